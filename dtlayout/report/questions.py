"""Questions that a sweep answers: choices, and the pairs of rows that differ in nothing else.

A pair is two rows of one sweep with the same model, batch, GPUs and everything but the choice (and what follows from
it: dp, on a fixed number of GPUs). Only numbers of GPUs are compared between sweeps.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import log
from typing import Any

from dtlayout.records.run import Run


@dataclass(frozen=True)
class Question:
    """A choice to learn about. Its functions take a row, most often a `Run`."""

    name: str
    """The choice as a heading."""
    choice: Callable[[Any], Hashable]
    """Function from a row to the value that it chose."""
    rest: Callable[[Any], Hashable]
    """Function from a row to everything that both rows of a pair share."""
    follows: Callable[[Any, Any], bool]
    """Whether the second choice is to be compared with the first."""
    before: str
    after: str
    """The two choices in words."""
    pool: Callable[[Any], Hashable] = lambda run: run.table
    """The rows that may be compared with each other: those of a sweep."""
    crosses_gpus: bool = False
    """Whether rows on different numbers of GPUs are compared."""
    explained: Callable[[Run, Run], float] = lambda first, second: 0.0
    """Log of the ratio of speeds that is no finding, because arithmetic foresees it."""
    explanation: str = ""
    """The effect that arithmetic foresees, in words."""


def choose(run: Run, name: str) -> Hashable:
    """Value of a field of a row's layout or kernels; None where there is nothing to choose."""
    if name == "sequence_parallel":
        return ("on" if run.layout.shards_sequence else "off") if run.layout.tp > 1 else None
    return getattr(run.kernels if hasattr(run.kernels, name) else run.layout, name)


def _training(run: Run) -> Hashable:
    """Model, batch, machines and program, which the rows of a pair share even on different numbers of GPUs."""
    s = run.scenario
    return s.model, s.batch, s.cluster.gpu, s.cluster.gpus_per_node, s.engine.name, s.precision


def _but(*names: str) -> Callable[[Run], Hashable]:
    """Function from a row to everything but its number of GPUs and these fields of its layout and kernels."""

    def rest(run: Run) -> Hashable:
        values = vars(run.layout) | vars(run.kernels)
        is_replicated = run.layout.dp_replicate > 1
        return _training(run), is_replicated, tuple(value for name, value in values.items() if name not in names)

    return rest


def _ask(name: str, field: str, follows: Callable[[Any, Any], bool], before: str, after: str, *also: str) -> Question:
    """A question about a field of the layout or the kernels; the fields of `also` change with it."""
    rest = _but(field, *also)
    return Question(
        name, lambda run: choose(run, field), lambda run: (run.scenario.cluster, rest(run)), follows, before, after
    )


def _fewer_microbatches(first: Run, second: Run) -> float:
    """Log of how much less of 1F1B's step is work in the second than in the first (arXiv:2104.04473, sec. 2.2)."""

    def work(run: Run) -> float:
        actions = max(1, run.layout.num_microbatches(run.scenario.batch)) * run.layout.virtual_stages
        return actions / (actions + run.layout.pp - 1)

    return log(work(second) / work(first))


def _is(before: Hashable, after: Hashable) -> Callable[[Hashable, Hashable], bool]:
    return lambda first, second: (first, second) == (before, after)


def _is_twice(first: int, second: int) -> bool:
    return second == 2 * first


_DP = ("dp_shard", "dp_replicate")
"""Fields that follow from the rest of a layout and the number of GPUs."""
QUESTIONS = (
    _ask("Larger micro-batches", "micro_batch", _is_twice,
         "the smaller micro-batch", "a micro-batch twice as large", *_DP),
    _ask("A fused RMSNorm", "norm", _is("eager", "fused"), "an eager norm", "a fused norm"),
    _ask("FlashAttention-2 instead of separate operations", "attention",
         lambda first, second: first in ("torch", "sdpa-math") and second == "sdpa-flash",
         "separate operations", "FlashAttention-2"),
    _ask("FlashAttention-2 instead of the first", "attention", _is("flash1", "sdpa-flash"),
         "the first FlashAttention", "the second FlashAttention"),
    _ask("Full recomputation", "recompute", _is("none", "full"), "no recomputation", "full recomputation", *_DP),
    _ask("Selective recomputation", "recompute", _is("none", "selective"),
         "no recomputation", "selective recomputation", *_DP),
    Question("Less tp and more pp", lambda run: run.layout.tp,
             lambda run: (run.scenario.cluster, _but("tp", "pp", *_DP)(run), run.layout.tp * run.layout.pp),
             lambda first, second: second < first, "more tp", "less tp and as much more pp"),
    *(_ask(f"{name} parallelism from {degree} to {2 * degree}", axis, _is(degree, 2 * degree),
           f"{axis}={degree}", f"{axis}={2 * degree}", *_DP)
      for axis, name, degrees in (("tp", "Tensor", (1, 2, 4)), ("pp", "Pipeline", (1, 2, 4, 8))) for degree in degrees),
    _ask("Sequence parallelism", "sequence_parallel", _is("off", "on"),
         "no sequence parallelism", "sequence parallelism", *_DP),
    _ask("ZeRO-3", "zero", _is(1, 3), "ZeRO-1", "ZeRO-3", *_DP),
    Question("Twice the GPUs for the same batch, speed of each", lambda run: run.scenario.cluster.num_gpus, _but(*_DP),
             _is_twice, "half as many", "twice the GPUs", _training, True, _fewer_microbatches, "the bubble"),
)  # fmt: skip
"""Questions that a sweep answers, after the study's sections (arXiv:2311.05610, sec. 4)."""
