"""What a sweep is made to learn: choices, and the pairs of rows that differ in nothing else.

A pair is two rows of one sweep with the same model, batch, GPUs and everything but the choice (and what follows from
it: dp, on a fixed number of GPUs). Only numbers of GPUs are compared between sweeps.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import log

from dtlayout.planner.runs import Run


@dataclass(frozen=True)
class Question:
    """A choice to learn about."""

    name: str
    """The choice as a heading."""
    choice: Callable[[Run], Hashable]
    """What a row chose."""
    rest: Callable[[Run], Hashable]
    """Everything that two rows of a pair share."""
    follows: Callable[[Hashable, Hashable], bool]
    """Whether the second choice is to be compared with the first."""
    before: str
    after: str
    """The two choices in words."""
    pool: Callable[[Run], Hashable] = lambda run: run.table
    """The rows that may be compared with each other: those of a sweep."""
    crosses_gpus: bool = False
    """Whether rows on different numbers of GPUs are compared."""
    explained: Callable[[Run, Run], float] = lambda first, second: 0.0
    """Log of the ratio of speeds that is no finding, because arithmetic foresees it."""
    explanation: str = ""
    """What arithmetic foresees, in words."""


def _shape(run: Run) -> Hashable:
    """What every pair shares."""
    return _training(run), run.scenario.cluster


def _training(run: Run) -> Hashable:
    """What every pair shares that may differ in its number of GPUs."""
    s = run.scenario
    return s.model, s.batch, s.cluster.gpu, s.cluster.gpus_per_node, s.engine.name, s.precision


def _but(*names: str, shared: Callable[[Run], Hashable] = _shape) -> Callable[[Run], Hashable]:
    """Everything of a row but these fields of its layout, and dp, which follows from them and the GPUs."""
    same = dict.fromkeys((*names, "dp_shard", "dp_replicate"), 1)

    def rest(run: Run) -> Hashable:
        is_replicated = run.layout.dp_replicate > 1
        values = {name: value for name, value in vars(run.layout).items() if name not in same}
        return shared(run), run.kernels, is_replicated, tuple(values.items())

    return rest


def _but_kernel(name: str) -> Callable[[Run], Hashable]:
    """Everything of a row but one of its kernels."""
    return lambda run: (_shape(run), run.layout, tuple((k, v) for k, v in vars(run.kernels).items() if k != name))


def _but_split(run: Run) -> Hashable:
    """Everything of a row but how tp and pp share what they are together."""
    return _but("tp", "pp")(run), run.layout.tp * run.layout.pp


def _fewer_microbatches(first: Run, second: Run) -> float:
    """Log of how much less of 1F1B's step is work in the second than in the first (arXiv:2104.04473, sec. 2.2)."""

    def work(run: Run) -> float:
        actions = max(1, run.layout.num_microbatches(run.scenario.batch)) * run.layout.virtual_stages
        return actions / (actions + run.layout.pp - 1)

    return log(work(second) / work(first))


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
        "the smaller micro-batch", "one twice as large",
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
    Question(
        "Twice the GPUs for the same batch, speed of each",
        lambda run: run.scenario.cluster.num_gpus, _but(shared=_training),
        lambda first, second: second == 2 * first,  # type: ignore[operator]
        "a number of GPUs", "twice as many", _training, True, _fewer_microbatches, "the bubble",
    ),
)  # fmt: skip
"""What a sweep is made to learn, after the study's sections (arXiv:2311.05610, sec. 4)."""
