"""Ranking: which layouts are alike, which are equally fast, and which of those comes first.

Layouts that are alike are one place, and the best of them stands for it. Those of one `LayoutKind` are alike by which
axes are on, in which order the pipeline works, and what is computed again, whatever the numbers. A kind whose best
takes `MOST_TIMES` as long as the best of all gets no place. Nor does one that is
dominated: a better one does without all that it adds, and needs as little memory.

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

MOST_TIMES = 2.0
"""Step times of the best as which an idea may take to be worth a place."""

LEAST_SPARED = 0.05
"""Share of a peak that a slower idea has to spare: about the median error of predicted peaks."""

_AXES = ("tp", "pp", "cp", "ep")


class LayoutKind(NamedTuple):
    """All of a layout but its numbers: layouts of one idea are neighbours, reached by turning a knob."""

    axes: tuple[str, ...]
    """Axes beside data parallelism that are on."""
    schedule: str
    """The pipeline's, where there is one."""
    recompute: str
    """What is computed again; of some blocks, whichever share of them, is one."""

    @classmethod
    def of(cls, layout: Layout) -> "LayoutKind":
        """The idea of a layout."""
        return cls.with_degrees(Degrees.of(layout), layout.schedule, layout.recompute)

    @classmethod
    def with_degrees(cls, degrees: Degrees, schedule: str, recompute: str) -> "LayoutKind":
        """The idea of layouts of some degrees."""
        axes = tuple(axis for axis in _AXES if getattr(degrees, axis) > 1)
        is_partial = Recompute.parse(recompute).every > 1
        return cls(axes, schedule if degrees.pp > 1 else "", "some" if is_partial else recompute)


class Timed(NamedTuple):
    """A layout with its exact step time, and what it needs as far as that is allowed."""

    time_s: float
    needed_bytes: float
    peak_bytes: float
    layout: Layout
    kernels: Kernels
    place: Hashable
    """What layouts that are alike have in common."""


IsWorse = Callable[[Timed, Timed], bool]
"""Whether the first gets no place, because there is the second."""


def never(timed: Timed, better: Timed) -> bool:
    """Says of no layout that it only costs: all places count."""
    return False


def is_dominated(timed: Timed, better: Timed) -> bool:
    """Whether a layout has all that a better one has, and spares no memory."""
    return parts_of(better.layout) <= parts_of(timed.layout) and (
        timed.peak_bytes > (1 - LEAST_SPARED) * better.peak_bytes
    )


def parts_of(layout: Layout) -> frozenset[str]:
    """What a layout has beside data parallelism, whatever the numbers: axes, virtual stages and recomputation."""
    parts = [axis for axis in _AXES if getattr(layout, axis) > 1]
    parts += ["virtual stages"] * (layout.virtual_stages > 1) + ["recompute"] * (layout.recompute != "none")
    return frozenset(parts)


def choose_best(
    timed: Sequence[Timed],
    top: int,
    capacity_bytes: float,
    most_times: float = inf,
    is_worse: IsWorse = never,
) -> list[Timed]:
    """The best `top`, of each place one: of all within a tie of the fastest that is left, the one with most room.

    Those that take more than `most_times` as long as the fastest of all are none, nor places that `is_worse` than one
    of the best before.
    """
    left = sorted(timed, key=lambda t: t.time_s)
    left = [t for t in left if t.time_s <= most_times * left[0].time_s]
    best: list[Timed] = []
    while left and len(best) < top:
        ties = [t for t in left if t.time_s <= left[0].time_s * (1 + TIE)]
        found = min(ties, key=lambda t: _preference(t, capacity_bytes))
        left = [t for t in left if t.place != found.place]
        if not any(is_worse(found, better) for better in best):
            best.append(found)
    return best


def to_percent(peak_bytes: float, capacity_bytes: float) -> int:
    """How full a peak leaves the capacity, as far as it counts."""
    return round(100 * peak_bytes / capacity_bytes)


def _preference(timed: Timed, capacity_bytes: float) -> tuple[int, int, float, str]:
    """Most room, least model parallelism, time but for rounding, and then always the same one."""
    room, parts = to_percent(timed.peak_bytes, capacity_bytes), timed.layout.tp * timed.layout.pp
    return room, parts, round(timed.time_s, 12), f"{timed.layout} {timed.kernels}"
