"""What measured rows answer to each question, from pairs that differ in nothing but the choice.

A finding is supported where the measured speeds, dealt out at random among the rows of their sweep, hardly ever show as
much: a permutation test, [Note: chance].
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

from dtlayout.planner.runs import Run
from dtlayout.report.chance import MOST_CHANCE, deal, number, rarity, sign_test
from dtlayout.report.questions import QUESTIONS, Question

FEWEST_PAIRS = 6
_NOISE = 0.005
"""Relative difference between repeated runs."""
_FITS = {"ok": 1.0, "oom": 0.0, "crashed_or_oom": 0.0}
"""Outcome → whether the layout fits; the others say nothing of it."""


@dataclass(frozen=True)
class Finding:
    """The answer to a question."""

    question: Question
    num_pairs: int
    """Pairs of which both rows ran."""
    share_faster: float | None
    """Share of the pairs in which the second row was faster."""
    factor: float | None
    """Median of the second's speed over the first's."""
    quartiles: tuple[float, float] | None
    """Lower and upper quartile of the second's speed over the first's."""
    explained: float | None
    """Median factor that needs no finding, being foreseen; 1 where nothing is."""
    beyond: float | None
    """Median of the factors over what is foreseen of each."""
    points: float | None
    """Median difference of MFU, second less first, where it is known."""
    p_speed: float | None
    """How often chance shows as large a factor beyond what is foreseen."""
    num_only_after: int
    """Pairs of which only the second fits."""
    num_only_before: int
    """Pairs of which only the first fits."""
    p_fit: float | None
    """How often chance shows as large a difference between the two numbers of pairs."""

    @property
    def speaks_of_speed(self) -> bool:
        """Whether the rows carry what is said of speed."""
        is_rare = self.num_pairs >= FEWEST_PAIRS and self.p_speed is not None and self.p_speed <= MOST_CHANCE
        return is_rare and self.differs

    @property
    def differs(self) -> bool:
        """Whether the median is more than noise of repeated runs, and than what is foreseen."""
        return self.beyond is not None and abs(log(self.beyond)) > _NOISE

    @property
    def speaks_of_fit(self) -> bool:
        """Whether the rows carry what is said of memory."""
        num_changed = self.num_only_after + self.num_only_before
        return num_changed >= FEWEST_PAIRS and self.p_fit is not None and self.p_fit <= MOST_CHANCE

    def describe(self) -> str:
        """Sentences with numbers; "not supported" where the rows do not carry it."""
        q, sentences = self.question, []
        foreseen = f", where {q.explanation} explains ×{self.explained:.2f}" if q.explanation and self.num_pairs else ""
        if self.num_pairs == 0:
            sentences.append(f"not supported: no two rows that ran differ only in {q.before} and {q.after}")
        elif not self.speaks_of_speed:
            assert self.quartiles is not None, "there are pairs"
            low, high = self.quartiles
            why = f"chance shows as much with p = {self.p_speed:.2g}"
            if self.num_pairs < FEWEST_PAIRS:
                why = f"fewer than {FEWEST_PAIRS} say nothing"
            sentences.append(
                f"not supported: speed ×{self.factor:.2f}, ×{low:.2f} to ×{high:.2f} between the quartiles{foreseen} "
                f"({_count(self.num_pairs, 'pair')}); {why}"
            )
        else:
            points = "" if self.points is None else f", {100 * self.points:+.1f} points of MFU"
            median = f"median of {self.num_pairs} pairs{points}"
            sentences.append(
                f"{q.after} instead of {q.before}: speed ×{self.factor:.2f} ({median}), faster in "
                f"{self.share_faster:.0%} of them{foreseen}"
            )
        if self.speaks_of_fit:
            only_before = f"{self.num_only_before} only with {q.before}"
            sentences.append(f"{_count(self.num_only_after, 'layout')} fit only with {q.after}, and {only_before}")
        return "; ".join(sentences)


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
        self.speeds = np.array([log(speed) if (speed := run.tokens_per_s_per_gpu) else np.nan for run in runs])
        self.totals = self.speeds + np.log([run.scenario.cluster.num_gpus for run in runs])
        self.fits = np.array([_FITS.get(run.outcome, np.nan) for run in runs])
        self._dealt: dict[tuple[str, Callable[[Run], Hashable]], np.ndarray] = {}

    def deal(self, name: str, pool: Callable[[Run], Hashable]) -> np.ndarray:
        """The values of that name dealt out anew within each pool; rows × deals."""
        if (name, pool) not in self._dealt:
            self._dealt[name, pool] = deal(getattr(self, name), number([pool(run) for run in self.runs]))
        return self._dealt[name, pool]


def _answer(question: Question, rows: _Rows) -> Finding:
    runs, speeds, fits = rows.runs, rows.speeds, rows.fits
    pairs = _pair(question, runs)
    ran = [(a, b) for a, b in pairs if not np.isnan(speeds[a]) and not np.isnan(speeds[b])]
    ratios = np.array([speeds[b] - speeds[a] for a, b in ran])
    explained = np.array([question.explained(runs[a], runs[b]) for a, b in ran])
    mfus = [(runs[a].mfu, runs[b].mfu) for a, b in ran]
    points = [after - before for before, after in mfus if before is not None and after is not None]
    judged = [(a, b) for a, b in pairs if not np.isnan(fits[a]) and not np.isnan(fits[b])]
    changes = np.array([fits[b] - fits[a] for a, b in judged])
    chances = [_chance(rows, "speeds", question, ran, _consistency, explained)]
    if question.crosses_gpus:
        chances.append(_chance(rows, "totals", question, ran, _consistency))
    p_fit = _chance(rows, "fits", question, judged, _agreement)
    return Finding(
        question=question,
        num_pairs=len(ran),
        share_faster=float((ratios > 0).mean()) if len(ran) else None,
        factor=exp(float(np.median(ratios))) if len(ran) else None,
        quartiles=tuple(np.exp(np.quantile(ratios, (0.25, 0.75))).tolist()) if len(ran) else None,
        explained=exp(float(np.median(explained))) if len(ran) else None,
        beyond=exp(float(np.median(ratios - explained))) if len(ran) else None,
        points=float(np.median(points)) if points else None,
        p_speed=max((p for p in chances if p is not None), default=None),
        num_only_after=int((changes > 0).sum()),
        num_only_before=int((changes < 0).sum()),
        p_fit=max(p_fit, sign_test(changes)) if p_fit is not None else None,
    )


def _pair(question: Question, runs: Sequence[Run]) -> list[tuple[int, int]]:
    """Places of rows to compare."""
    alike: defaultdict[Hashable, list[int]] = defaultdict(list)
    for i, run in enumerate(runs):
        alike[question.pool(run), question.rest(run)].append(i)
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
    rows: _Rows,
    name: str,
    question: Question,
    pairs: Sequence[tuple[int, int]],
    statistic: Callable[[np.ndarray], np.ndarray],
    explained: np.ndarray | float = 0.0,
) -> float | None:
    """How often values that were dealt out anew show at least what they do beyond what is explained: [Note: chance]."""
    if not pairs:
        return None
    values, dealt = getattr(rows, name), rows.deal(name, question.pool)
    before, after = (np.array(places) for places in zip(*pairs, strict=True))
    foreseen = np.broadcast_to(explained, before.shape)[:, None]
    measured = (values[after] - values[before])[:, None]
    return rarity(statistic(dealt[after] - dealt[before] - foreseen), statistic(measured - foreseen))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
