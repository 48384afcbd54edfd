"""Explain: what binds a layout, and which single changes would make it fit or faster.

A change sets one knob: a degree, which another degree pays for so that the number of GPUs stays; the micro-batch, the
schedule, the split of blocks over stages, ZeRO, recomputation, offload or a kernel. Every legal change is predicted.
For each knob the fastest change that fits is kept, if it is faster than the layout or the layout does not fit. If no
change fits, more GPUs are tried.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from math import inf

from dtlayout.base.refusals import show_value
from dtlayout.costmodel.estimate import Estimate, Estimator, find_busiest
from dtlayout.costmodel.messages import AxisMessages, list_messages
from dtlayout.costmodel.scenario import Scenario, find_refusals
from dtlayout.planner.coarse_state import find_coarse_state
from dtlayout.planner.fine_tuning import list_fine_tunings
from dtlayout.planner.neighbours import find_moves, find_splits, grow, other_kernels
from dtlayout.spec.kernels import Kernels, OpenKernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.optimizers import STATE_FORMAT

LEAST_GAIN = 0.01
"""Share of the step that a change must save to be named; measured steps vary by as much."""
MOST_CHANGES = 5
"""Number of changes that are named."""
MOST_GPUS = 1 << 16
"""Largest number of GPUs that is tried."""


@dataclass(frozen=True)
class Limit:
    """The limit of a layout: the memory that it lacks, or the largest component of its step."""

    kind: str
    """One of memory, host memory and time."""
    component: str
    """The largest component of the fullest rank's memory, or of the step."""
    share: float
    """The component's fraction of that rank's peak, or of the step. For host memory, the fraction of the host's memory
    that is needed."""
    pipeline_rank: int | None
    """The fullest pipeline rank; None where time is the limit."""


@dataclass(frozen=True)
class Change:
    """A change of one knob, with its prediction."""

    knob: str
    """Name of the key that is set; another degree may have to follow."""
    overrides: tuple[str, ...]
    """Arguments of `dtlayout train` that make the change."""
    estimate: Estimate


@dataclass(frozen=True)
class Explanation:
    """An estimate, its limit, and the changes that would help."""

    estimate: Estimate
    limit: Limit
    changes: tuple[Change, ...]
    """Single changes that help, fastest first."""
    growth: Change | None
    """A layout on more GPUs, if no single change fits on these; None if one does, or if no number of GPUs would do."""
    copied_s: float = 0.0
    """Seconds of a step in which a rank's link to its host copies; 0 without offload."""
    waited_s: float = 0.0
    """Seconds by which the step is longer because it waits for these copies, and for the disk."""
    on_disk_s: float = 0.0
    """Seconds of a step in which a rank's disk reads and writes; 0 where nothing lies there."""
    fine_tuning: Change | None = None
    """The layout with a LoRA beside a frozen model, on a base of 4 bits if need be, where it does not fit without."""
    step_rank: int = 0
    """The pipeline rank whose step the estimate's time tells: the busiest one."""
    messages: tuple[tuple[AxisMessages, ...], ...] = ()
    """Messages of each pipeline rank, for each axis along which it sends any."""
    peak_reserved_bytes: int | None = None
    """The most that PyTorch's allocator of any rank reserves; None where that is not predicted."""


def explain(scenario: Scenario, layout: Layout, kernels: Kernels) -> Explanation:
    """The explanation of a legal layout."""
    estimator = Estimator(scenario)
    now = estimator.estimate(layout, kernels)
    changes = find_changes(estimator, now)
    growth = None if now.fits or changes else find_growth(estimator, now)
    stages = () if scenario.is_on_host else estimator.work(layout, kernels)
    waits = any(work.host_s > LEAST_GAIN * (work.forward_s + work.backward_s) for work in stages)
    limit = find_limit(now, waits_for_host=waits)
    times = estimator.rank_times(layout, kernels, now.memory)
    messages = list_messages(estimator, layout, kernels, times)
    found = Explanation(
        now, limit, changes, growth, on_disk_s=estimator.on_disk_s(layout),
        fine_tuning=find_fine_tuning(scenario, now), step_rank=find_busiest(times)[0],
        messages=tuple(map(tuple, messages.values())),
        peak_reserved_bytes=estimator.peak_reserved_bytes(layout, kernels),
    )  # fmt: skip
    if layout.offload == "none" or scenario.is_on_host:
        return found
    gpu = replace(scenario.cluster.gpu, host_link_bytes_per_s=inf, disk_bytes_per_s=inf)
    at_once = Estimator(replace(scenario, cluster=replace(scenario.cluster, gpu=gpu))).estimate(layout, kernels)
    waited_s = max(0.0, now.step_time_s - at_once.step_time_s)
    return replace(found, copied_s=estimator.copied_s(layout, kernels), waited_s=waited_s)


def find_limit(estimate: Estimate, *, waits_for_host: bool) -> Limit:
    """The limit of an estimate: memory if a rank has too little, else the largest component of the step.

    A GPU that waits for its host is bound by the host, however short the part of the step in which it waits.
    """
    if not estimate.fits_host and estimate.needed_bytes <= estimate.capacity_bytes:
        fullest = max(estimate.host_bytes)
        return Limit(
            "host memory", "offload", fullest / estimate.host_capacity_bytes, estimate.host_bytes.index(fullest)
        )
    rank = None if estimate.fits else estimate.busiest_rank
    whole = estimate.time if rank is None else estimate.memory[rank]
    parts = whole.as_dict()
    component = "host" if rank is None and waits_for_host else max(parts, key=parts.__getitem__)
    size = parts[component]
    return Limit("time" if rank is None else "memory", component, size / whole.total, rank)


def find_changes(estimator: Estimator, now: Estimate) -> tuple[Change, ...]:
    """For each knob the fastest change that fits and gains; the fastest knob first.

    Where nothing fits yet, the format of the optimizer's state is a knob too.
    """
    least_s = LEAST_GAIN * now.step_time_s if now.fits else -inf
    gaining = [c for c in _try_moves(estimator, now) if now.step_time_s - c.estimate.step_time_s > least_s]
    coarse = None if now.fits else find_coarse_state(estimator.scenario)
    if coarse and _fits(other := Estimator(coarse.scenario), now.layout, now.kernels):
        gaining.append(Change(STATE_FORMAT, coarse.overrides, other.estimate(now.layout, now.kernels)))
    best: dict[str, Change] = {}
    for change in sorted(gaining, key=lambda c: c.estimate.step_time_s):
        best.setdefault(change.knob, change)
    return tuple(best.values())[:MOST_CHANGES]


def find_growth(estimator: Estimator, now: Estimate) -> Change | None:
    """The fastest layout that fits on the fewest GPUs, with degrees doubled, any ZeRO and recomputation, and the same
    micro-batch or 1.

    None if nothing fits on MOST_GPUS. All are bounded by the work of their busiest rank, and only those are predicted
    whose bound is below the best.
    """
    scenario, factor = estimator.scenario, 2
    while factor * now.layout.world_size <= MOST_GPUS:
        larger = replace(scenario.cluster, num_gpus=factor * now.layout.world_size)
        estimator = Estimator(replace(scenario, cluster=larger))
        grown = [g for g in set(grow(estimator.scenario, now.layout, factor)) if _fits(estimator, g, now.kernels)]
        best: Change | None = None
        bounds = {layout: estimator.lower_bound_s(layout, now.kernels) for layout in grown}
        for layout, bound_s in sorted(bounds.items(), key=lambda item: (item[1], str(item[0]))):
            if best and bound_s >= best.estimate.step_time_s:
                break
            change = _to_change(estimator, now, "GPUs", layout, now.kernels)
            best = min(best or change, change, key=lambda c: c.estimate.step_time_s)
        if best:
            return best
        factor *= 2
    return None


def find_fine_tuning(scenario: Scenario, now: Estimate) -> Change | None:
    """The layout where less is trained, in the cheapest way in which it fits; None if it fits as it is, or in none."""
    for way in list_fine_tunings(scenario) if not now.fits else ():
        estimator = Estimator(way.scenario)
        if _fits(estimator, now.layout, now.kernels):
            return Change("fine-tuning", way.overrides, estimator.estimate(now.layout, now.kernels))
    return None


def find_overrides(old: tuple[Layout, Kernels | OpenKernels], new: tuple[Layout, Kernels]) -> tuple[str, ...]:
    """Arguments of `dtlayout train` that run the new layout and kernels where the config has the old ones."""
    before, after = ({"layout": asdict(layout), "kernels": vars(kernels)} for layout, kernels in (old, new))
    return tuple(
        f"--{section}.{name}={show_value(value)}"
        for section, values in after.items()
        for name, value in values.items()
        if value != before[section][name]
    )


def _try_moves(estimator: Estimator, now: Estimate) -> Iterator[Change]:
    """Every legal single change that fits, with its prediction."""
    model, batch = estimator.scenario.model, estimator.scenario.batch
    tried = {now.layout}
    splits = [("stage_layers", cut) for cut in find_splits(estimator, now.layout, now.kernels)]
    for knob, moved in chain(find_moves(now.layout, batch, model.num_layers), splits):
        if knob == "offload" and estimator.scenario.is_on_host:  # which has one memory
            continue
        if moved not in tried and moved.is_legal(model, batch) and _fits(estimator, moved, now.kernels):
            yield _to_change(estimator, now, knob, moved, now.kernels)
        tried.add(moved)
    for knob, others in other_kernels(now.kernels):
        if _fits(estimator, now.layout, others):
            yield _to_change(estimator, now, knob, now.layout, others)


def _fits(estimator: Estimator, layout: Layout, kernels: Kernels) -> bool:
    """Whether the engine runs a layout, and it fits on each rank and its host; its time is not predicted."""
    return (
        not find_refusals(estimator.scenario, layout, kernels)
        and estimator.memory(layout, kernels).peak_bytes <= estimator.capacity_bytes
        and estimator.fits_host(layout, kernels)
    )


def _to_change(estimator: Estimator, now: Estimate, knob: str, layout: Layout, kernels: Kernels) -> Change:
    overrides = find_overrides((now.layout, now.kernels), (layout, kernels))
    if layout.has_state_on_disk and not layout.offload_folder:
        overrides = (*overrides, "--layout.offload_folder=FOLDER")
    return Change(knob, overrides, estimator.estimate(layout, kernels))
