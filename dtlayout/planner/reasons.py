"""Reasons: what stands against a layout, in one sentence with numbers.

A layout is illegal, or a rank holds too much, or it is slower than another and spends the difference somewhere.
`judge` says which; `neighbours` are the layouts that differ from one in a single choice.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from dtlayout.costmodel.estimate import Estimate
from dtlayout.costmodel.scenario import engine_kernels, find_refusals
from dtlayout.kernels import Kernels, OpenKernels
from dtlayout.layout import Layout, show_value
from dtlayout.pipelining.schedules import DEFAULT_SCHEDULE, schedule_with
from dtlayout.planner.search import TIE, Search
from dtlayout.planner.space import KERNEL_NAMES, RECOMPUTE, Space, searched_kernels
from dtlayout.text import GIB, plural

_PARTS = {
    "compute": "computing", "recompute": "recomputing", "tp": "waiting for tp", "pp": "sending between stages",
    "bubble": "the bubble", "dp": "data-parallel communication", "optimizer": "the optimizer", "host": "the host",
}  # fmt: skip


class Verdict(NamedTuple):
    """The judgement of a layout: everything that stands against it."""

    layout: Layout
    kernels: Kernels
    outcome: Literal["not legal", "does not fit", "slower", "as fast", "faster"]
    """In comparison with another; a layout that does not fit may be faster."""
    problems: tuple[str, ...]
    """One line each; the first says most."""
    estimate: Estimate | None
    """Memory and time; None where it is not legal."""


def judge(search: Search, layout: Layout, kernels: Kernels, best: Estimate) -> Verdict:
    """Judge a layout in comparison with the best one of a search."""
    if problems := find_problems(search.space, layout, kernels):
        return Verdict(layout, kernels, "not legal", tuple(problems), None)
    found = search.estimator.estimate(layout, kernels)
    if found.needed_bytes > search.allowed_bytes:
        return Verdict(layout, kernels, "does not fit", (describe_shortage(found, search.allowed_bytes),), found)
    change, text = found.step_time_s / best.step_time_s - 1, describe_difference(best, found)
    if abs(change) <= TIE:
        return Verdict(layout, kernels, "as fast", (f"as fast: {text}",), found)
    return Verdict(layout, kernels, "slower" if change > 0 else "faster", (text,), found)


def find_problems(space: Space, layout: Layout, kernels: Kernels) -> list[str]:
    """Everything that keeps the trainer from running it on this cluster."""
    scenario, num_gpus = space.scenario, space.scenario.cluster.num_gpus
    needs = f"{layout} needs {plural(layout.world_size, 'GPU')}, the cluster has {num_gpus}"
    return (
        [needs] * (layout.world_size != num_gpus)
        + layout.problems(scenario.model, scenario.batch)
        + find_refusals(scenario, layout, kernels)
    )


def describe_shortage(estimate: Estimate, allowed_bytes: float) -> str:
    """Which rank holds too much, how much too much, and what it mostly is."""
    rank, fullest = max(enumerate(estimate.memory), key=lambda each: each[1].needed)
    parts, needed = sorted(fullest.as_dict().items(), key=lambda part: -part[1]), fullest.needed
    named = [f"{name} {size / GIB:.1f}" for name, size in parts if name != "run_ahead" and size >= 0.05 * GIB]
    return (
        f"pipeline rank {rank} needs {needed / GIB:.1f} GiB of {allowed_bytes / GIB:.1f}, "
        f"{(needed - allowed_bytes) / GIB:.1f} GiB too much: {', '.join(named) or 'little'}"
    )


def describe_difference(other: Estimate, own: Estimate, than: str = "") -> str:
    """How much slower or faster `own` is than `other`, and in which parts of the step."""
    change = own.step_time_s / other.step_time_s - 1
    before, after = other.time.as_dict(), own.time.as_dict()
    differences = sorted(((after[part] - before[part], part) for part in before), key=lambda d: -abs(d[0]))
    least = 0.001 * other.step_time_s
    named = [(seconds, part) for seconds, part in differences if abs(seconds) >= least][:3]
    # What makes the difference comes first, what goes the other way follows.
    named.sort(key=lambda d: (d[0] * change < 0, -abs(d[0])))
    text = ", ".join(f"{_seconds(abs(s))} {'more' if s > 0 else 'less'} in {_PARTS[part]}" for s, part in named)
    head = f"{abs(change):.1%} {'slower' if change > 0 else 'faster'}{than}"
    return f"{head}: {text}" if text else f"{head}, in no part by 0.1 % of the step"


def describe_lead(own: Estimate, following: Estimate, place: int) -> str:
    """Why a layout stands before the next one, at `place`."""
    if abs(following.step_time_s / own.step_time_s - 1) > TIE:
        return describe_difference(following, own, f" than {place}")
    room = following.peak_bytes - own.peak_bytes
    if room <= -0.01 * own.capacity_bytes:  # which was too slow for a tie with the fastest that was left
        return f"{following.step_time_s / own.step_time_s - 1:.1%} faster than {place}, if {-room / GIB:.1f} GiB fuller"
    if room >= 0.01 * own.capacity_bytes:
        return f"as fast as {place} within {TIE:.1%}, with {room / GIB:.1f} GiB more free"
    return f"as fast as {place} within {TIE:.1%}, and as full; it has no more model parallelism"


def parse_layout(space: Space, choices: dict[str, Any]) -> tuple[Layout, Kernels]:
    """The layout that some choices name: every other field at its default, dp_shard as the GPUs that are left."""
    named = {**space.fixed, **choices}
    asked = OpenKernels(**{name: named.pop(name) for name in KERNEL_NAMES if name in named})
    if named.get("virtual_stages", 1) > 1:
        named.setdefault("schedule", schedule_with(named["virtual_stages"]))
    named.setdefault("dp_shard", max(1, space.scenario.cluster.num_gpus // Layout(**named).world_size))
    layout = Layout(**named)
    return layout, engine_kernels(space.scenario, asked, layout)


def spread(layout: Layout, num_gpus: int) -> Layout | None:
    """The layout with data parallelism over all GPUs that its other axes leave; None where they don't come out even."""
    alone = replace(layout, dp_shard=1, dp_replicate=1)
    dp, left = divmod(num_gpus, alone.world_size)
    return None if left else replace(alone, dp_shard=dp)


def neighbours(search: Search, best: Estimate) -> Iterator[tuple[str, Layout, Kernels]]:
    """Layouts that differ from `best` in one choice, which names them.

    Data parallelism takes up the GPUs, and shares the state in the best way that there is then, unless that is the
    choice.
    """
    layout, num_gpus = best.layout, search.space.scenario.cluster.num_gpus
    plain: dict[str, Any] = {"schedule": DEFAULT_SCHEDULE, "virtual_stages": 1}

    def around(name: str) -> list[dict[str, Any]]:
        value = getattr(layout, name)
        return [{name: value // 2}] * (value % 2 == 0) + [{name: 2 * value}]

    choices = around("tp")
    choices += [choice | (plain if choice["pp"] == 1 else {}) for choice in around("pp")]
    choices += around("micro_batch")
    if layout.virtual_stages > 1:
        choices.append(plain)
    elif layout.pp > 1:
        choices.append({"virtual_stages": 2, "schedule": schedule_with(2)})
    if layout.dp > 1:
        choices += [{"zero": zero} for zero in (1, 2, 3) if zero != layout.zero]
    choices += [{"recompute": r} for r in RECOMPUTE[:4] if r != layout.recompute]
    if layout.tp > 1:
        choices.append({"sequence_parallel": not layout.sequence_parallel})
    if layout.shards_sequence:
        choices.append({"tp_overlap": not layout.tp_overlap})
    for name, values in searched_kernels().items():
        choices.append({name: next(value for value in values if value != getattr(best.kernels, name))})
    for choice in choices:
        name, value = next(iter(choice.items()))
        kernels = replace(best.kernels, **choice) if name in KERNEL_NAMES else best.kernels
        changed = layout if name in KERNEL_NAMES else replace(layout, **choice)
        other = spread(changed, num_gpus) if name in ("tp", "pp") else changed
        if other is None:
            continue
        if name != "zero" and not find_problems(search.space, other, kernels):
            other = search.reshard(other, kernels)
        yield f"{name}={show_value(value)}", other, kernels


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"
