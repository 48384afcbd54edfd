"""Reasons: what stands against a layout, in one sentence with numbers.

A layout is illegal, or a rank holds too much, or it is slower than another and spends the difference somewhere.
`judge` says which; `neighbours` are the layouts that differ from one in a single choice.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from dtlayout.costmodel.estimate import Estimate, Estimator
from dtlayout.costmodel.scenario import find_refusals
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.pipelining.schedules import DEFAULT_SCHEDULE, schedule_with
from dtlayout.planner.search import TIE, Search, needed_bytes
from dtlayout.planner.space import CHOICES, KERNEL_NAMES, RECOMPUTE, Space, searched_kernels
from dtlayout.text import GIB

_PARTS = {
    "compute": "computing", "recompute": "recomputing", "tp": "waiting for tp", "pp": "sending between stages",
    "bubble": "the bubble", "dp": "data-parallel communication", "optimizer": "the optimizer", "host": "the host",
}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """The judgement of a layout: everything that stands against it."""

    layout: Layout
    kernels: Kernels
    outcome: Literal["not legal", "does not fit", "slower", "as fast", "faster"]
    """In comparison with another; a layout that does not fit may be faster."""
    problems: tuple[str, ...]
    """One line each; the first says most."""
    estimate: Estimate | None
    """Memory and time; None where it is not legal."""


def judge(
    space: Space, estimator: Estimator, layout: Layout, kernels: Kernels, allowed_bytes: float, best: Estimate | None
) -> Verdict:
    """Judge a layout in comparison with `best`."""
    if problems := find_problems(space, layout, kernels):
        return Verdict(layout, kernels, "not legal", tuple(problems), None)
    found = estimator.estimate(layout, kernels)
    if needed_bytes(found) > allowed_bytes:
        return Verdict(layout, kernels, "does not fit", (describe_shortage(found, allowed_bytes),), found)
    if best is None or abs(found.step_time_s / best.step_time_s - 1) <= TIE:
        text = "it is legal and fits" if best is None else f"as fast: {describe_difference(best, found)}"
        return Verdict(layout, kernels, "as fast", (text,), found)
    outcome: Literal["slower", "faster"] = "slower" if found.step_time_s > best.step_time_s else "faster"
    return Verdict(layout, kernels, outcome, (describe_difference(best, found),), found)


def find_problems(space: Space, layout: Layout, kernels: Kernels) -> list[str]:
    """Everything that keeps the trainer from running it on this cluster."""
    scenario, problems = space.scenario, []
    if layout.world_size != scenario.cluster.num_gpus:
        problems.append(f"{layout} needs {layout.world_size} GPUs, the cluster has {scenario.cluster.num_gpus}")
    return problems + layout.problems(scenario.model, scenario.batch) + find_refusals(scenario, layout, kernels)


def describe_shortage(estimate: Estimate, allowed_bytes: float) -> str:
    """Which rank holds too much, how much too much, and what it mostly is."""
    needed = needed_bytes(estimate)
    rank = next(i for i, rank in enumerate(estimate.memory) if rank.needed == needed)
    parts = sorted(estimate.memory[rank].as_dict().items(), key=lambda part: -part[1])
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
    layout = {name: value for name, value in named.items() if name in CHOICES and name not in KERNEL_NAMES}
    asked = Kernels(**{name: value for name, value in named.items() if name in KERNEL_NAMES})
    kernels, _ = asked.resolve(space.scenario.precision, space.scenario.device)
    if layout.get("virtual_stages", 1) > 1:
        layout.setdefault("schedule", schedule_with(layout["virtual_stages"]))
    if "dp_shard" not in layout:
        degree = Layout(**layout).world_size
        layout["dp_shard"] = max(1, space.scenario.cluster.num_gpus // degree)
    return Layout(**layout), kernels


def neighbours(search: Search, best: Estimate) -> Iterator[tuple[str, Layout, Kernels]]:
    """Layouts that differ from `best` in one choice, which names them.

    Data parallelism takes up the GPUs, and shares the state in the best way that there is then, unless that is the
    choice.
    """
    space = search.space
    layout, kernels, num_gpus = best.layout, best.kernels, space.scenario.cluster.num_gpus
    plain = {"schedule": DEFAULT_SCHEDULE, "virtual_stages": 1}

    def spread(**changes: Any) -> Layout | None:
        wanted = replace(layout, dp_shard=1, dp_replicate=1, **changes)
        return replace(wanted, dp_shard=num_gpus // wanted.world_size) if num_gpus % wanted.world_size == 0 else None

    def around(value: int) -> list[int]:
        return [value // 2] * (value % 2 == 0) + [2 * value]

    found: list[tuple[str, Layout | None, Kernels]] = []
    found += [(f"tp={tp}", spread(tp=tp), kernels) for tp in around(layout.tp)]
    found += [(f"pp={pp}", spread(pp=pp, **(plain if pp == 1 else {})), kernels) for pp in around(layout.pp)]
    found += [(f"micro_batch={n}", replace(layout, micro_batch=n), kernels) for n in around(layout.micro_batch)]
    if layout.virtual_stages > 1:
        found.append((f"schedule={DEFAULT_SCHEDULE}", replace(layout, **plain), kernels))  # type: ignore[arg-type]
    elif layout.pp > 1:
        found.append(("virtual_stages=2", replace(layout, schedule=schedule_with(2), virtual_stages=2), kernels))
    if layout.dp > 1:
        found += [(f"zero={zero}", replace(layout, zero=zero), kernels) for zero in (1, 2, 3) if zero != layout.zero]
    found += [(f"recompute={r}", replace(layout, recompute=r), kernels) for r in RECOMPUTE[:4] if r != layout.recompute]
    if layout.tp > 1:
        off = not layout.sequence_parallel
        found.append((f"sequence_parallel={str(off).lower()}", replace(layout, sequence_parallel=off), kernels))
    for name, values in searched_kernels().items():
        other = next(value for value in values if value != getattr(kernels, name))
        found.append((f"{name}={other}", layout, replace(kernels, **{name: other})))  # type: ignore[arg-type]
    for name, other_layout, other_kernels in found:
        if other_layout is None:
            continue
        if not name.startswith("zero=") and not find_problems(space, other_layout, other_kernels):
            other_layout = search.reshard(other_layout, other_kernels)
        yield name, other_layout, other_kernels


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"
