"""Simplicity: which of several layouts is the simplest, for those that a prediction cannot tell apart.

A layout is simpler than another one if it has fewer axes above 1, beside plain data parallelism; else fewer messages
that are sent beside computation (tp_overlap, ep_overlap, another dispatcher); else no recomputation; else 1F1B before
other schedules, and fewer virtual stages; else a lower stage of ZeRO; else smaller degrees. Each of these is one thing
less to set up, to watch and to debug.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from dtlayout.costmodel.estimate import Estimate
from dtlayout.schedules.schedules import DEFAULT_SCHEDULE
from dtlayout.spec.batch import Batch
from dtlayout.spec.layout import Layout

_AXES = ("pp", "cp", "tp", "ep")


class Complexity(NamedTuple):
    """Counts of all that a layout has beside data parallelism; the simpler of two layouts has the lower tuple."""

    num_axes: int
    """Axes above 1 beside data parallelism; copies of shards (HSDP) count as one."""
    num_overlaps: int
    """tp_overlap, ep_overlap and a dispatcher that is not the plain all-to-all."""
    recomputes: bool
    """Whether anything is computed again."""
    order: int
    """0 without a pipeline and for 1F1B; 1 for other schedules."""
    virtual_stages: int
    zero: int
    model_parallel: int
    """Ranks that share one copy of the model: pp · cp · tp."""

    @classmethod
    def of(cls, layout: Layout) -> "Complexity":
        """The complexity of a layout; what has no effect beside its degrees counts for nothing.

        >>> Complexity.of(Layout(dp_shard=8)) < Complexity.of(Layout(tp=8)) < Complexity.of(Layout(pp=2, tp=4))
        True
        """
        own, off = layout.effective, Layout()
        overlaps = (own.tp_overlap, own.ep_overlap, own.ep_dispatcher != off.ep_dispatcher)
        return cls(
            num_axes=sum(getattr(own, axis) > 1 for axis in _AXES) + (own.dp_replicate > 1 and own.dp_shard > 1),
            num_overlaps=sum(overlaps),
            recomputes=own.recompute != "none",
            order=int(own.schedule != DEFAULT_SCHEDULE),
            virtual_stages=own.virtual_stages,
            zero=own.zero,
            model_parallel=prod(getattr(own, axis) for axis in ("pp", "cp", "tp")),
        )


def put_simplest_first(ranked: Sequence[Estimate], places: int) -> tuple[Estimate, ...]:
    """The simplest of the first `places` estimates, then all others as they came; of equally simple ones the first."""
    if places < 2:
        return tuple(ranked)
    simplest = min(ranked[:places], key=lambda estimate: Complexity.of(estimate.layout))
    return (simplest, *(estimate for estimate in ranked if estimate is not simplest))


def without_idle_overlap(layout: Layout, batch: Batch) -> Layout:
    """The layout without ep_overlap where a rank has one microbatch, beside which there is no other to compute."""
    is_idle = layout.overlaps_ep and layout.num_microbatches(batch) <= 1
    return replace(layout, ep_overlap=False) if is_idle else layout
