"""Verdicts: the reason against a layout, in one sentence with numbers.

A layout is illegal, or a rank holds too much, or it is slower than another one, and some part of the step takes longer.
`judge` says which. `judge_others` judges the best layout with each choice that the best of all does not have.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Literal, NamedTuple, TypeVar

from dtlayout.base.formatting import GIB, join_words, plural
from dtlayout.base.refusals import show_value
from dtlayout.costmodel.estimate import Estimate
from dtlayout.costmodel.memory import NOT_NEEDED
from dtlayout.costmodel.scenario import engine_kernels, find_refusals
from dtlayout.planner.neighbours import choose, list_choices
from dtlayout.planner.ranking import TIE, to_percent
from dtlayout.planner.search import Search
from dtlayout.planner.space import KERNEL_NAMES, Space
from dtlayout.records.intervals import find_intervals
from dtlayout.schedules.schedules import schedule_with
from dtlayout.spec.kernels import Kernels, OpenKernels
from dtlayout.spec.layout import Layout

_PARTS = {
    "compute": "computing", "recompute": "recomputing", "tp": "waiting for {}", "pp": "sending between stages",
    "bubble": "the bubble", "dp": "data-parallel communication", "optimizer": "the optimizer", "host": "the host",
}  # fmt: skip

_KEPT_BESIDE_KERNELS = ("tp", "pp", "cp", "ep", "schedule", "virtual_stages", "sequence_parallel")
"""Fields of a layout that stay the same when another kernel, or tp_overlap, is tried."""
_LEAST_DIFFERENCE = 0.0005
"""Smallest relative difference of step times that is written as a number."""

V = TypeVar("V")

Judgement = Literal["not legal", "does not fit", "too full", "slower", "as fast", "faster"]


class Verdict(NamedTuple):
    """The judgement of a layout, with every reason against it."""

    layout: Layout
    kernels: Kernels
    outcome: Judgement
    """Result of the comparison with another layout; a layout that does not fit may be faster, and so may one that is
    too full: it needs more than the search allows, and no more than there is."""
    problems: tuple[str, ...]
    """Reasons, one line each; the first says most."""
    estimate: Estimate | None
    """Memory and time; None if it is not legal."""


def judge(search: Search, layout: Layout, kernels: Kernels, best: Estimate) -> Verdict:
    """The verdict on a layout, in comparison with the best one of a search."""
    if problems := find_problems(search.space, layout, kernels):
        return Verdict(layout, kernels, "not legal", tuple(problems), None)
    found = search.estimator.estimate(layout, kernels)
    if not search.has_room(found):
        problems = [describe_shortage(found, search.allowed_bytes), *describe_doubt(search, found)]
        return Verdict(layout, kernels, "too full" if found.fits else "does not fit", tuple(problems), found)
    change = found.step_time_s / best.step_time_s - 1
    text = describe_difference(best, found, least=TIE)
    outcome: Judgement = "as fast" if abs(change) <= TIE else "slower" if change > 0 else "faster"
    return Verdict(layout, kernels, outcome, (text,), found)


def describe_doubt(search: Search, found: Estimate) -> list[str]:
    """A line if a layout that does not fit may do so all the same: its peak is not predicted that exactly."""
    if found.fits:
        capacity = f"{found.capacity_bytes / GIB:.1f} GiB that there are"
        return [f"it needs no more than the {capacity}; --max-memory 1.0 allows it"]
    low = find_intervals(search.space.scenario).peak_memory.low
    if low * found.needed_bytes > found.capacity_bytes:
        return []
    return [f"measured peaks were as low as {low:.2f} times the predicted ones, so it may fit all the same"]


def find_problems(space: Space, layout: Layout, kernels: Kernels) -> list[str]:
    """A line for everything that keeps the engine from running the layout on this cluster."""
    scenario = space.scenario
    counts = _count_problems(layout, scenario.cluster.num_gpus)
    if scenario.cluster.num_gpus % (layout.world_size // layout.dp):  # no dp would do, so nothing is said of one
        layout = replace(layout, dp_shard=1, dp_replicate=1)
    return counts + layout.problems(scenario.model, scenario.batch) + find_refusals(scenario, layout, kernels)


def _count_problems(layout: Layout, num_gpus: int) -> list[str]:
    """A line if the degrees don't multiply to the number of GPUs, or if no dp could make them."""
    degrees = {name: getattr(layout, name) for name in ("tp", "pp", "cp") if getattr(layout, name) > 1}
    alone = prod(degrees.values())
    if num_gpus % alone == 0:
        needs = f"it needs {plural(layout.world_size, 'GPU')}, and the cluster has {num_gpus}"
        return [needs] * (layout.world_size != num_gpus)
    product = " * ".join(f"{name}={degree}" for name, degree in degrees.items()) + f" = {alone}" * (len(degrees) > 1)
    return [f"{product} does not divide the {num_gpus} GPUs of the cluster; use degrees that do"]


def describe_shortage(estimate: Estimate, allowed_bytes: float) -> str:
    """A sentence on the fullest rank: the bytes that it has too much, and its largest components."""
    rank, fullest = max(enumerate(estimate.memory), key=lambda each: each[1].needed)
    parts, needed = sorted(fullest.as_dict().items(), key=lambda part: -part[1]), fullest.needed
    named = [f"{name} {size / GIB:.1f}" for name, size in parts if name not in NOT_NEEDED and size >= 0.05 * GIB]
    where = f"pipeline rank {rank}" if estimate.layout.is_pipelined else "each rank"
    return (
        f"{where} needs {needed / GIB:.1f} GiB of {allowed_bytes / GIB:.1f}, "
        f"{(needed - allowed_bytes) / GIB:.1f} GiB too much: {', '.join(named) or 'little'}"
    )


def describe_difference(other: Estimate, own: Estimate, than: str = "", least: float = _LEAST_DIFFERENCE) -> str:
    """A sentence on how much slower or faster `own` is than `other`, and in which parts of the step.

    Relative differences up to `least` are a tie.
    """
    change = own.step_time_s / other.step_time_s - 1
    before, after = other.time.as_dict(), own.time.as_dict()
    differences = sorted(((after[part] - before[part], part) for part in before), key=lambda d: -abs(d[0]))
    named = [(seconds, part) for seconds, part in differences if abs(seconds) >= 0.001 * other.step_time_s][:3]
    # What makes the difference comes first, what goes the other way follows.
    named.sort(key=lambda d: (d[0] * change < 0, -abs(d[0])))
    parts = name_parts(other.layout, own.layout)
    text = ", ".join(f"{_seconds(abs(s))} {'more' if s > 0 else 'less'} in {parts[part]}" for s, part in named)
    head = f"{abs(change):.1%} {'slower' if change > 0 else 'faster'}{than}"
    if abs(change) <= least:
        head = "as fast" if abs(change) < _LEAST_DIFFERENCE else f"as fast within {least:.1%}"
    return f"{head}: {text}" if text else head


def name_parts(*layouts: Layout) -> dict[str, str]:
    """Part of a step → words for it, where these layouts run."""
    waits_for = [axis for axis in ("tp", "cp", "ep") if any(getattr(layout, axis) > 1 for layout in layouts)]
    return {part: name.format(join_words(waits_for)) for part, name in _PARTS.items()}


def describe_lead(own: Estimate, following: Estimate, place: int | str) -> str:
    """The reason why a layout is ranked before the next one, which is called `place`."""
    if abs(following.step_time_s / own.step_time_s - 1) > TIE:
        return describe_difference(following, own, f" than {place}")
    room = following.peak_bytes - own.peak_bytes
    if room <= -0.01 * own.capacity_bytes and own.step_time_s > following.step_time_s:  # the simplest comes first
        return f"as fast as {place} within {TIE:.1%}, if {-room / GIB:.1f} GiB fuller"
    if room <= -0.01 * own.capacity_bytes:  # which was too slow for a tie with the fastest that was left
        return f"{following.step_time_s / own.step_time_s - 1:.1%} faster than {place}, if {-room / GIB:.1f} GiB fuller"
    alike = f"as fast as {place} within {TIE:.1%}"
    if to_percent(own.peak_bytes, own.capacity_bytes) < to_percent(following.peak_bytes, own.capacity_bytes):
        return f"{alike}, with {room / GIB:.1f} GiB more free"
    parts, others = (each.layout.tp * each.layout.pp for each in (own, following))
    if parts < others:
        if parts == 1:
            return f"{alike} and as full, and leaves the model whole instead of cutting it into {others} parts"
        return f"{alike} and as full, and cuts the model into {parts} parts instead of {others}"
    return f"{alike} and as full"


def parse_layout(space: Space, choices: dict[str, Any]) -> tuple[Layout, Kernels]:
    """The layout and kernels that some choices name: other fields at their defaults, dp_shard over the other GPUs."""
    named = {**space.fixed, **choices}
    asked = {name: named.pop(name) for name in KERNEL_NAMES if name in named}
    if named.get("virtual_stages", 1) > 1:
        named.setdefault("schedule", schedule_with(named["virtual_stages"]))
    if not space.scenario.engine.features.has_sequence_parallel:
        named.setdefault("sequence_parallel", False)
    named.setdefault("dp_shard", max(1, space.scenario.cluster.num_gpus // Layout(**named).world_size))
    layout = Layout(**named)
    return layout, replace(engine_kernels(space.scenario, OpenKernels(), layout), **asked)


def judge_others(search: Search, best: Estimate) -> Iterator[tuple[str, Verdict]]:
    """Choices that the best does not have, by name, each with the verdict on the best layout that has it.

    All else is searched again, beside another kernel or tp_overlap all but `_KEPT_BESIDE_KERNELS`. Where nothing with a
    choice is legal and fits, the layout that differs from the best in nothing else is judged. What the user has fixed
    or ruled out is no choice.
    """
    for name, value in list_choices(search.space, best):
        if found := _search_with(search, best, name, value):
            layout, kernels = found.layout, found.kernels
        else:
            layout, kernels = choose(best, name, value, search.space.scenario.cluster.num_gpus)
        yield f"{name}={show_value(value)}", judge(search, layout, kernels, best)


def fold_alike(rows: Iterable[tuple[str, V]], said: Callable[[V], Hashable]) -> list[tuple[str, V]]:
    """Rows by name, where rows for which `said` returns the same are one.

    >>> fold_alike([("tp=2", 1), ("zero=1", 5), ("tp=4", 1), ("pp=8", 1)], abs)
    [('tp=2 or 4, pp=8', 1), ('zero=1', 5)]
    """
    folded: dict[Hashable, tuple[list[str], V]] = {}
    for name, value in rows:
        folded.setdefault(said(value), ([], value))[0].append(name)
    return [(name_together(names), value) for names, value in folded.values()]


def name_together(changes: Sequence[str]) -> str:
    """Choices as one text, with the values of a field beside each other.

    >>> name_together(["tp=2", "pp=8", "tp=4"])
    'tp=2 or 4, pp=8'
    """
    values: dict[str, list[str]] = {}
    for change in changes:
        name, _, value = change.partition("=")
        values.setdefault(name, []).append(value)
    return ", ".join(f"{name}={' or '.join(each)}" for name, each in values.items())


def _search_with(search: Search, best: Estimate, name: str, value: Any) -> Estimate | None:
    if name not in (*KERNEL_NAMES, "tp_overlap"):  # of which the search has kept no more than the best
        return search.best_with(name, value)
    kept = {each: getattr(best.layout, each) for each in _KEPT_BESIDE_KERNELS}
    narrow = search.with_fixed({**kept, **search.space.fixed, name: value})
    return next(iter(narrow.run(top=1).ranked), None)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"
