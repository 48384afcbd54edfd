"""What measured rows say about a choice: pairs that differ in nothing else, and whether chance could say the same.

A pair is two rows of one sweep with the same model, batch, GPUs and everything but the choice (and what follows from
it: dp, on a fixed number of GPUs). A finding is supported where the measured speeds, dealt out at random among the rows
of their sweep, hardly ever show as much: a permutation test, [Note: chance].

[Note: chance]
Rows take part in several pairs, so a test that takes pairs as independent would believe too much. Instead the speeds of
a sweep's rows are permuted NUM_DEALS times, and the share of deals that show at least what was measured is the
p-value; up to MOST_CHANCE a finding stands. Some forty of them yield a false one in about one of 25 reports on noise.
What is compared is the mean of the log ratios over their root mean square, 1 where all pairs say the same, so that few
pairs are enough if they agree closely. "Fits" is treated alike, with the outcomes dealt out instead of the speeds.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

from dtlayout.models.counting import count_model_flops_per_token
from dtlayout.planner.runs import Run

NUM_DEALS = 4999
MOST_CHANCE = 1e-3
FEWEST_PAIRS = 6
_NOISE = 0.005
"""Relative difference between repeated runs."""
_FIT, _MISFIT = ("ok",), ("oom", "crashed_or_oom")


@dataclass(frozen=True)
class Question:
    """A choice to learn about."""

    name: str
    """As a heading."""
    choice: Callable[[Run], Hashable]
    """What a row chose."""
    rest: Callable[[Run], Hashable]
    """Everything that two rows of a pair share."""
    follows: Callable[[Hashable, Hashable], bool]
    """Whether the second choice is to be compared with the first."""
    before: str
    after: str
    """The two in words."""


@dataclass(frozen=True)
class Finding:
    """The answer to a question."""

    question: Question
    num_pairs: int
    """Of rows that both ran."""
    share_faster: float | None
    """Of those, in how many the second was faster."""
    factor: float | None
    """Median of the second's speed over the first's."""
    quartiles: tuple[float, float] | None
    """The same of the lower and the upper quarter."""
    points: float | None
    """Median difference of MFU, second less first, where it is known."""
    p_speed: float | None
    """How often chance shows as much."""
    num_only_after: int
    """Pairs of which only the second fits."""
    num_only_before: int
    p_fit: float | None
    """How often chance shows as large a difference between those."""

    @property
    def speaks_of_speed(self) -> bool:
        """Whether the rows carry what is said of speed."""
        is_rare = self.num_pairs >= FEWEST_PAIRS and self.p_speed is not None and self.p_speed <= MOST_CHANCE
        return is_rare and self.differs

    @property
    def differs(self) -> bool:
        """Whether the median is more than noise of repeated runs."""
        return self.factor is not None and abs(log(self.factor)) > _NOISE

    @property
    def speaks_of_fit(self) -> bool:
        """Whether the rows carry what is said of memory."""
        num_changed = self.num_only_after + self.num_only_before
        return num_changed >= FEWEST_PAIRS and self.p_fit is not None and self.p_fit <= MOST_CHANCE

    def describe(self) -> str:
        """In words, with numbers; "not supported" where the rows do not carry it."""
        q, sentences = self.question, []
        if self.num_pairs == 0:
            sentences.append(f"not supported: no two rows that ran differ only in {q.before} and {q.after}")
        elif not self.speaks_of_speed:
            assert self.quartiles is not None, "there are pairs"
            low, high = self.quartiles
            sentences.append(
                f"not supported: speed ×{self.factor:.2f}, ×{low:.2f} to ×{high:.2f} between the quartiles "
                f"({_count(self.num_pairs, 'pair')}); chance shows as much with p = {self.p_speed:.2g}"
            )
        else:
            points = "" if self.points is None else f", {100 * self.points:+.1f} points of MFU"
            median = f"median of {self.num_pairs} pairs{points}"
            sentences.append(
                f"{q.after} instead of {q.before}: speed ×{self.factor:.2f} ({median}), faster in "
                f"{self.share_faster:.0%} of them"
            )
        if self.speaks_of_fit:
            only_before = f"{self.num_only_before} only with {q.before}"
            sentences.append(f"{self.num_only_after} layouts fit only with {q.after}, and {only_before}")
        return "; ".join(sentences)


def speed_of(run: Run) -> float | None:
    """Tokens a second of one GPU, measured; from the MFU where no time is given; None if it did not run."""
    batch, cluster = run.scenario.batch, run.scenario.cluster
    if run.status != "ok":
        return None
    if run.step_time_s:
        return batch.num_tokens / run.step_time_s / cluster.num_gpus
    if run.mfu:
        return run.mfu * cluster.gpu.peak_flops_per_s / count_model_flops_per_token(run.scenario.model, batch.seq_len)
    return None


def find(runs: Sequence[Run]) -> list[Finding]:
    """The answers that rows give to all questions."""
    rows = _Rows(runs)
    return [_answer(question, rows) for question in QUESTIONS]


def answer(question: Question, runs: Sequence[Run]) -> Finding:
    """What rows say to one question."""
    return _answer(question, _Rows(runs))


class _Rows:
    """What is measured of rows, and the same dealt out anew, which all questions share."""

    def __init__(self, runs: Sequence[Run]):
        self.runs = runs
        tables = _number([run.table for run in runs])
        self.speeds = np.array([log(speed) if (speed := speed_of(run)) else np.nan for run in runs])
        self.fits = np.array([1.0 if run.status in _FIT else 0.0 if run.status in _MISFIT else np.nan for run in runs])
        self.dealt_speeds, self.dealt_fits = _deal(self.speeds, tables), _deal(self.fits, tables)


def _answer(question: Question, rows: _Rows) -> Finding:
    runs, speeds, fits = rows.runs, rows.speeds, rows.fits
    pairs = _pair(question, runs)
    ran = [(a, b) for a, b in pairs if not np.isnan(speeds[a]) and not np.isnan(speeds[b])]
    ratios = np.array([speeds[b] - speeds[a] for a, b in ran])
    points = [
        after - before for a, b in ran if (before := runs[a].mfu) is not None and (after := runs[b].mfu) is not None
    ]
    judged = [(a, b) for a, b in pairs if not np.isnan(fits[a]) and not np.isnan(fits[b])]
    changes = np.array([fits[b] - fits[a] for a, b in judged])
    return Finding(
        question=question,
        num_pairs=len(ran),
        share_faster=float((ratios > 0).mean()) if len(ran) else None,
        factor=exp(float(np.median(ratios))) if len(ran) else None,
        quartiles=tuple(np.exp(np.quantile(ratios, (0.25, 0.75))).tolist()) if len(ran) else None,
        points=float(np.median(points)) if points else None,
        p_speed=_chance(speeds, rows.dealt_speeds, ran, _consistency),
        num_only_after=int((changes > 0).sum()),
        num_only_before=int((changes < 0).sum()),
        p_fit=_chance(fits, rows.dealt_fits, judged, _agreement),
    )


def _pair(question: Question, runs: Sequence[Run]) -> list[tuple[int, int]]:
    """Places of rows to compare."""
    alike: defaultdict[Hashable, list[int]] = defaultdict(list)
    for i, run in enumerate(runs):
        alike[run.table, question.rest(run)].append(i)
    return [
        (a, b)
        for places in alike.values()
        for a in places
        for b in places
        if question.follows(question.choice(runs[a]), question.choice(runs[b]))
    ]


def _consistency(ratios: np.ndarray) -> np.ndarray:
    """How far the pairs agree on who is faster and by how much; pairs × deals → deals."""
    size = np.sqrt((ratios**2).mean(axis=0))
    return np.abs(ratios.mean(axis=0)) / np.maximum(size, 1e-12)


def _agreement(changes: np.ndarray) -> np.ndarray:
    """How far the pairs of which only one fits agree on which; pairs × deals → deals."""
    num_changed = np.abs(changes).sum(axis=0)
    return np.abs(changes.sum(axis=0)) / np.maximum(num_changed, 1)


def _chance(
    values: np.ndarray,
    dealt: np.ndarray,
    pairs: Sequence[tuple[int, int]],
    statistic: Callable[[np.ndarray], np.ndarray],
) -> float | None:
    """How often values that were dealt out anew show at least what they do: [Note: chance]."""
    if not pairs:
        return None
    before, after = (np.array(places) for places in zip(*pairs, strict=True))
    return _rarity(statistic(dealt[after] - dealt[before]), statistic((values[after] - values[before])[:, None]))


def _deal(values: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """The values of each table's rows in NUM_DEALS random orders; rows × deals. What is not known stays so."""
    generator = np.random.default_rng(0)
    dealt = np.repeat(values[:, None], NUM_DEALS, axis=1)
    for table in np.unique(tables):
        places = np.flatnonzero((tables == table) & ~np.isnan(values))
        dealt[places] = generator.permuted(dealt[places], axis=0)
    return dealt


def _rarity(found: np.ndarray, measured: np.ndarray) -> float:
    """The share of deals that show at least what was measured, the measured one among them."""
    return float((1 + (found >= measured - 1e-12).sum()) / (1 + len(found)))


def _number(names: Sequence[str]) -> np.ndarray:
    known = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return np.array([known[name] for name in names])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _shape(run: Run) -> Hashable:
    """What every pair shares."""
    s = run.scenario
    return s.model, s.batch, s.cluster, s.engine.name, s.precision


def _but(*names: str) -> Callable[[Run], Hashable]:
    """Everything of a row but these fields of its layout, and dp, which follows from them."""
    same = dict.fromkeys((*names, "dp_shard", "dp_replicate"), 1)

    def rest(run: Run) -> Hashable:
        is_replicated = run.layout.dp_replicate > 1
        values = {name: value for name, value in vars(run.layout).items() if name not in same}
        return _shape(run), run.kernels, is_replicated, tuple(values.items())

    return rest


def _but_kernel(name: str) -> Callable[[Run], Hashable]:
    """Everything of a row but one of its kernels."""
    return lambda run: (_shape(run), run.layout, tuple((k, v) for k, v in vars(run.kernels).items() if k != name))


def _but_split(run: Run) -> Hashable:
    """Everything of a row but how tp and pp share what they are together."""
    return _but("tp", "pp")(run), run.layout.tp * run.layout.pp


def _is(before: Hashable, after: Hashable) -> Callable[[Hashable, Hashable], bool]:
    return lambda first, second: (first, second) == (before, after)


def _doubling(axis: str, name: str, degree: int) -> Question:
    return Question(
        f"{name} from {degree} to {2 * degree}", lambda run: getattr(run.layout, axis), _but(axis),
        _is(degree, 2 * degree), f"{axis}={degree}", f"{axis}={2 * degree}",
    )  # fmt: skip


QUESTIONS = (
    Question(
        "Larger micro-batches", lambda run: run.layout.micro_batch, _but("micro_batch"),
        lambda first, second: second == 2 * first,  # type: ignore[operator]
        "a micro-batch", "one twice as large",
    ),
    Question(
        "A fused RMSNorm", lambda run: run.kernels.norm, _but_kernel("norm"), _is("eager", "fused"),
        "an eager norm", "a fused one",
    ),
    Question(
        "FlashAttention-2 instead of separate operations", lambda run: run.kernels.attention, _but_kernel("attention"),
        lambda first, second: first in ("torch", "sdpa-math") and second == "sdpa-flash",
        "separate operations", "FlashAttention-2",
    ),
    Question(
        "FlashAttention-2 instead of the first", lambda run: run.kernels.attention, _but_kernel("attention"),
        _is("flash1", "sdpa-flash"), "the first FlashAttention", "the second",
    ),
    Question(
        "Full recomputation", lambda run: run.layout.recompute, _but("recompute"), _is("none", "full"),
        "no recomputation", "full recomputation",
    ),
    Question(
        "Selective recomputation", lambda run: run.layout.recompute, _but("recompute"), _is("none", "selective"),
        "no recomputation", "selective recomputation",
    ),
    Question(
        "Less tp and more pp", lambda run: run.layout.tp, _but_split,
        lambda first, second: second < first,  # type: ignore[operator]
        "more tp", "less tp and as much more pp",
    ),
    *(_doubling("tp", "Tensor parallelism", degree) for degree in (1, 2, 4)),
    *(_doubling("pp", "Pipeline parallelism", degree) for degree in (1, 2, 4, 8)),
    Question(
        "Sequence parallelism", lambda run: run.layout.shards_sequence, _but("sequence_parallel"), _is(False, True),
        "none", "sequence parallelism",
    ),
    Question(
        "ZeRO-3", lambda run: run.layout.zero, _but("zero"), _is(1, 3), "ZeRO-1", "ZeRO-3",
    ),
)  # fmt: skip
"""What a sweep is made to learn, after the study's sections (arXiv:2311.05610, sec. 4)."""


@dataclass(frozen=True)
class Common:
    """What the fastest rows of each sweep have in common."""

    name: str
    """The choice."""
    value: Hashable
    """What most of them chose."""
    share: float
    """Of the fastest."""
    share_of_all: float
    """Of all that ran."""
    p: float
    """How often as many of rows taken at random chose one and the same."""

    def describe(self) -> str:
        """In words."""
        if self.p > MOST_CHANCE:
            return f"not supported: {self.name}={self.value} in {self.share:.0%} of them, chance has p = {self.p:.2g}"
        return f"{self.name}={self.value} in {self.share:.0%} of them, and in {self.share_of_all:.0%} of all that ran"


_FASTEST = 0.1
"""Share of a sweep's rows that are its fastest."""
CHOICES: dict[str, Callable[[Run], Hashable]] = {
    "micro_batch": lambda run: run.layout.micro_batch,
    "tp": lambda run: run.layout.tp,
    "pp": lambda run: run.layout.pp,
    "recompute": lambda run: run.layout.recompute,
    "attention": lambda run: run.kernels.attention,
    "norm": lambda run: run.kernels.norm,
}


def find_common(runs: Sequence[Run]) -> list[Common]:
    """For each choice with several values, the one that the fastest tenth of each sweep favours most."""
    ran = [run for run in runs if speed_of(run)]
    if not ran:
        return []
    tables, speeds = _number([run.table for run in ran]), np.array([speed_of(run) for run in ran])
    fastest = _fastest(speeds[:, None], tables)
    dealt = _fastest(_deal(speeds, tables), tables)
    common = []
    for name, choice in CHOICES.items():
        chosen = [choice(run) for run in ran]
        if len(set(chosen)) == 1:
            continue
        options = np.array([[value == option for value in chosen] for option in dict.fromkeys(chosen)], dtype=float)
        shares = options @ fastest / fastest.sum()  # options × 1
        gains = shares - options.mean(axis=1, keepdims=True)
        best = int(np.argmax(gains))
        chances = (options @ dealt / fastest.sum() - options.mean(axis=1, keepdims=True)).max(axis=0)
        common.append(
            Common(
                name=name,
                value=list(dict.fromkeys(chosen))[best],
                share=float(shares[best, 0]),
                share_of_all=float(options[best].mean()),
                p=_rarity(chances, gains[best]),
            )
        )
    return common


def _fastest(speeds: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """1 for the rows that are of the fastest tenth of their table, at least one of each; rows × deals."""
    found = np.zeros(speeds.shape)
    for table in np.unique(tables):
        places = np.flatnonzero(tables == table)
        number = max(1, round(_FASTEST * len(places)))
        order = np.argsort(-speeds[places], axis=0, kind="stable")[:number]
        np.put_along_axis(found, places[order], 1.0, axis=0)
    return found
