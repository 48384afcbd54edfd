"""Ranking: which layouts are alike, which are equally fast, and which of those comes first.

Alike layouts are one *group*, and the best of them stands for it. Groups may be `LayoutKind`s: layouts of one kind have
the same axes on, the same schedule and the same recomputation, whatever the numbers. A kind is not ranked if its best
step takes `MAX_SLOWDOWN` times the best of all. Neither is a kind that is *dominated*: a better one does without
something that it has, adds nothing, and needs as little memory.

Step times within 0.5 % of each other are a tie: free memory decides, in whole percents of the capacity, then less model
parallelism (tp · pp), then time.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

from dtlayout.planner.space import Degrees
from dtlayout.schedules.schedules import find_schedule
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

Preference = tuple[Any, ...]
"""Sort key of tied layouts: the preferred one has the smallest."""


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
    preference: Preference = ()
    """`prefer` of it."""


Dominance = Callable[[TimedLayout, TimedLayout], bool]
"""Says whether the first layout is dominated by the second, a better one, and so is not ranked."""


def no_dominance(timed: TimedLayout, better: TimedLayout) -> bool:
    """Says of no layout that it is dominated: all groups are ranked."""
    return False


def is_dominated(timed: TimedLayout, better: TimedLayout) -> bool:
    """True if a layout has all parts that a better one has, and spares no memory."""
    return timed.peak_bytes > (1 - LEAST_SPARED) * better.peak_bytes and (
        _parts_of(LayoutKind.of(better.layout)) <= _parts_of(LayoutKind.of(timed.layout))
    )


@cache
def _parts_of(kind: LayoutKind) -> frozenset[str]:
    """Names of what is on in layouts of a kind beside data parallelism: axes, virtual stages and recomputation.

    Virtual stages are a part where the schedule cannot do without them.
    """
    parts = [*kind.axes, "recompute"] if kind.recompute != "none" else [*kind.axes]
    has_virtual_stages = kind.schedule and find_schedule(kind.schedule).least_virtual_stages > 1
    return frozenset([*parts, "virtual stages"] if has_virtual_stages else parts)


class RankedLayout(NamedTuple):
    """A layout of the best, and when it is sure to be one."""

    timed: TimedLayout
    settled_s: float
    """Step time: layouts that take longer, found later, put no other layout in its place or before it."""


def choose_best(
    timed: Sequence[TimedLayout], top: int, max_slowdown: float = inf, dominance: Dominance = no_dominance
) -> list[RankedLayout]:
    """The best `top` layouts, one of each group: among all within a tie of the fastest left, the preferred one.

    Layouts that take more than `max_slowdown` times the fastest of all are left out, and those that are slower than a
    tie with the fastest of their group. So are layouts that are dominated by one ranked before them, and groups of
    which the preferred layout is.
    """
    left = sorted(timed, key=attrgetter("time_s"))
    left = [each for each in left if each.time_s <= max_slowdown * left[0].time_s]
    fastest_of = dict[Hashable, float]()
    left = [each for each in left if each.time_s <= (1 + TIE) * fastest_of.setdefault(each.group, each.time_s)]
    stands_for = _find_preferred(left) if dominance is not no_dominance else {}
    best: list[RankedLayout] = []
    while left and len(best) < top:
        fastest_s = left[0].time_s
        found = min([each for each in left if each.time_s <= (1 + TIE) * fastest_s], key=attrgetter("preference"))
        best.append(RankedLayout(found, settled_s=(1 + TIE) ** 2 * fastest_s))
        left = [each for each in left if each.group != found.group]
        if dominance is not no_dominance:
            out = {group for group, each in stands_for.items() if dominance(each, found)}
            left = [each for each in left if each.group not in out and not dominance(each, found)]
    return best


def _find_preferred(timed: Sequence[TimedLayout]) -> dict[Hashable, TimedLayout]:
    """Group → the preferred of its layouts."""
    preferred = dict[Hashable, TimedLayout]()
    for each in timed:
        preferred[each.group] = min(preferred.get(each.group, each), each, key=attrgetter("preference"))
    return preferred


def prefer(time_s: float, peak_bytes: float, layout: Layout, capacity_bytes: float, text: str = "") -> Preference:
    """The preference of a layout: memory, model parallelism, time but for rounding, and text, to have no tie left.

    From the least time and bytes that a layout takes, and no text, it is a lower bound.
    """
    return to_percent(peak_bytes, capacity_bytes), layout.tp * layout.pp, round(time_s, 12), text


def to_percent(peak_bytes: float, capacity_bytes: float) -> int:
    """A peak in whole percents of the capacity; ranking compares memory no finer than that."""
    return round(100 * peak_bytes / capacity_bytes)
