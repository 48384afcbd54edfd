"""Ranking: which layouts are alike, which are equally fast, and which of those comes first.

Alike layouts are one *group*, and the best of them stands for it. Groups may be `LayoutKind`s: layouts of one kind have
the same axes on, the same schedule and the same recomputation, whatever the numbers. A kind is not ranked if its best
step takes `MAX_SLOWDOWN` times the best of all. Neither is a kind that is *dominated*: a better one does without
something that it has, adds nothing, and needs as little memory.

Step times within 0.5 % of each other are a tie: free memory decides, in whole percents of the capacity, then less model
parallelism (tp · pp), then time.
"""

from collections.abc import Callable, Hashable, Sequence
from math import inf
from typing import NamedTuple

from dtlayout.planner.space import Degrees
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.recompute import Recompute

TIE = 0.005
"""Relative difference of step times below which two layouts are equally fast."""

MAX_SLOWDOWN = 2.0
"""Ratio of a kind's best step time to the best of all, above which the kind is not ranked."""

LEAST_SPARED = 0.05
"""Share of a better layout's peak that a layout must spare not to be dominated: about the median error of peaks."""

_AXES = ("tp", "pp", "cp", "ep")


class LayoutKind(NamedTuple):
    """All of a layout but its numbers: layouts of one kind differ by turning a knob."""

    axes: tuple[str, ...]
    """Axes beside data parallelism that are on."""
    schedule: str
    """The pipeline's schedule; empty without a pipeline."""
    recompute: str
    """The recomputation; "some" if only a share of the blocks is recomputed, whatever the share."""

    @classmethod
    def of(cls, layout: Layout) -> "LayoutKind":
        """The kind of a layout."""
        return cls.with_degrees(Degrees.of(layout), layout.schedule, layout.recompute)

    @classmethod
    def with_degrees(cls, degrees: Degrees, schedule: str, recompute: str) -> "LayoutKind":
        """The kind of all layouts with some degrees, schedule and recomputation."""
        axes = tuple(axis for axis in _AXES if getattr(degrees, axis) > 1)
        is_partial = Recompute.parse(recompute).is_partial
        return cls(axes, schedule if degrees.pp > 1 else "", "some" if is_partial else recompute)


class TimedLayout(NamedTuple):
    """A layout with its exact step time and memory."""

    time_s: float
    needed_bytes: float
    """Bytes that the fullest rank cannot run without."""
    peak_bytes: float
    """Peak bytes of the fullest rank."""
    layout: Layout
    kernels: Kernels
    group: Hashable
    """The group of alike layouts that it belongs to."""


Dominance = Callable[[TimedLayout, TimedLayout], bool]
"""Says whether the first layout is dominated by the second, a better one, and so is not ranked."""


def no_dominance(timed: TimedLayout, better: TimedLayout) -> bool:
    """Says of no layout that it is dominated: all groups are ranked."""
    return False


def is_dominated(timed: TimedLayout, better: TimedLayout) -> bool:
    """Whether a layout has all parts that a better one has, and spares no memory."""
    return parts_of(better.layout) <= parts_of(timed.layout) and (
        timed.peak_bytes > (1 - LEAST_SPARED) * better.peak_bytes
    )


def parts_of(layout: Layout) -> frozenset[str]:
    """Names of what is on in a layout beside data parallelism: axes, virtual stages and recomputation."""
    parts = [axis for axis in _AXES if getattr(layout, axis) > 1]
    parts += ["virtual stages"] * (layout.virtual_stages > 1) + ["recompute"] * (layout.recompute != "none")
    return frozenset(parts)


def choose_best(
    timed: Sequence[TimedLayout],
    top: int,
    capacity_bytes: float,
    max_slowdown: float = inf,
    dominance: Dominance = no_dominance,
) -> list[TimedLayout]:
    """The best `top` layouts, one of each group: among all within a tie of the fastest left, the one with most room.

    Layouts that take more than `max_slowdown` times the fastest of all are left out, and groups whose best one is
    dominated by a layout ranked before it.
    """
    left = sorted(timed, key=lambda t: t.time_s)
    left = [t for t in left if t.time_s <= max_slowdown * left[0].time_s]
    best: list[TimedLayout] = []
    while left and len(best) < top:
        ties = [t for t in left if t.time_s <= left[0].time_s * (1 + TIE)]
        found = min(ties, key=lambda t: _preference(t, capacity_bytes))
        left = [t for t in left if t.group != found.group]
        if not any(dominance(found, better) for better in best):
            best.append(found)
    return best


def to_percent(peak_bytes: float, capacity_bytes: float) -> int:
    """A peak in whole percents of the capacity; ranking compares memory no finer than that."""
    return round(100 * peak_bytes / capacity_bytes)


def _preference(timed: TimedLayout, capacity_bytes: float) -> tuple[int, int, float, str]:
    """Sort key of tied layouts: memory, model parallelism, time but for rounding, and text, to have no tie left."""
    percent, model_parallel = to_percent(timed.peak_bytes, capacity_bytes), timed.layout.tp * timed.layout.pp
    return percent, model_parallel, round(timed.time_s, 12), f"{timed.layout} {timed.kernels}"
