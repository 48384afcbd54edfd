"""Explain: what binds a layout, and which single changes would make it fit or faster.

A change sets one knob: a degree, traded against another so that the world stays, the micro-batch, the schedule, how
blocks are split over stages, ZeRO, recomputation, offload or a kernel. All that are legal are predicted; of each knob
the fastest that fits is kept, if it is faster than the layout or the layout does not fit. If none fits, more GPUs are
tried.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, product
from math import inf
from typing import Any, Literal

from dtlayout.costmodel.estimate import Estimate, Estimator
from dtlayout.costmodel.scenario import Scenario, find_refusals
from dtlayout.planner.stage_balance import MOST_STAGES, balance_memory, balance_time
from dtlayout.schedules.schedules import DEFAULT_SCHEDULE, SCHEDULES
from dtlayout.spec.batch import Batch
from dtlayout.spec.kernel_table import Kernel, list_kernels
from dtlayout.spec.kernels import Kernels, OpenKernels
from dtlayout.spec.layout import OFFLOADS, Layout, show_value
from dtlayout.spec.model_shape import divisors

LEAST_GAIN = 0.01
"""Share of the step that a change must save to be worth a word; less is within what measured steps vary."""
MOST_CHANGES = 5
"""Changes that are named."""
MOST_GPUS = 1 << 16
"""Where the search for a number of GPUs that would do ends."""

_TRADES = (
    ("tp", "dp_shard"), ("tp", "dp_replicate"), ("tp", "pp"), ("pp", "dp_shard"), ("pp", "dp_replicate"),
    ("dp_replicate", "dp_shard"), ("cp", "dp_shard"), ("cp", "dp_replicate"), ("cp", "tp"), ("cp", "pp"),
)  # fmt: skip
"""The knob, and the degree that gives what it takes."""
_ZERO: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
_RECOMPUTE = ("none", "selective", "keep-attention", "every-4", "every-2", "full")
_MOST_VIRTUAL_STAGES = 8


@dataclass(frozen=True)
class Limit:
    """The limit of a layout: memory that it lacks, or the component that most of its step is spent on."""

    kind: str
    """memory, host memory or time."""
    component: str
    """The largest component of the fullest rank's memory, or of the step."""
    share: float
    """The component's fraction of that rank's peak, or of the step; what lies on the host, of what it has."""
    pipeline_rank: int | None
    """The fullest pipeline rank; None where time is the limit."""


@dataclass(frozen=True)
class Change:
    """One knob set otherwise, and what is predicted then."""

    knob: str
    """The name of what is set; another degree may have to follow."""
    overrides: tuple[str, ...]
    """Arguments of train.py that make the change."""
    estimate: Estimate


@dataclass(frozen=True)
class Explanation:
    """An estimate, what binds it and what would help."""

    estimate: Estimate
    limit: Limit
    changes: tuple[Change, ...]
    """Single changes that help, fastest first."""
    growth: Change | None
    """A layout on more GPUs, where no single change fits on these; None where one does, or where no number would do."""
    copied_s: float = 0.0
    """Seconds of a step in which a rank's link to its host copies; 0 without offload."""
    waited_s: float = 0.0
    """Of them those for which the step is longer."""


def explain(scenario: Scenario, layout: Layout, kernels: Kernels) -> Explanation:
    """Explain a legal layout."""
    estimator = Estimator(scenario)
    now = estimator.estimate(layout, kernels)
    changes = find_changes(estimator, now)
    growth = None if now.fits or changes else find_growth(estimator, now)
    stages = () if scenario.is_on_host else estimator.work(layout, kernels)
    waits = any(work.host_s > LEAST_GAIN * (work.forward_s + work.backward_s) for work in stages)
    found = Explanation(now, find_limit(now, waits_for_host=waits), changes, growth)
    if layout.offload == "none" or scenario.is_on_host:
        return found
    gpu = replace(scenario.cluster.gpu, host_link_bytes_per_s=inf)
    at_once = Estimator(replace(scenario, cluster=replace(scenario.cluster, gpu=gpu))).estimate(layout, kernels)
    waited_s = max(0.0, now.step_time_s - at_once.step_time_s)
    return replace(found, copied_s=estimator.copied_s(layout, kernels), waited_s=waited_s)


def find_limit(estimate: Estimate, *, waits_for_host: bool) -> Limit:
    """Memory where a rank has too little, else what the step is mostly spent on.

    A GPU that waits for its host is bound by that, however little of the step is left to wait for.
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
    """The fastest setting of each knob that fits and gains, fastest first."""
    least_s = LEAST_GAIN * now.step_time_s if now.fits else -inf
    gaining = [c for c in _try_moves(estimator, now) if now.step_time_s - c.estimate.step_time_s > least_s]
    best: dict[str, Change] = {}
    for change in sorted(gaining, key=lambda c: c.estimate.step_time_s):
        best.setdefault(change.knob, change)
    return tuple(best.values())[:MOST_CHANGES]


def find_growth(estimator: Estimator, now: Estimate) -> Change | None:
    """The fastest that fits on the fewest GPUs: degrees doubled, any ZeRO and recomputation, micro-batch as it is or 1.

    None if nothing fits on MOST_GPUS. All are bounded by the work of their busiest rank, and only those are predicted
    whose bound is below the best.
    """
    scenario, factor = estimator.scenario, 2
    while factor * now.layout.world_size <= MOST_GPUS:
        larger = replace(scenario.cluster, num_gpus=factor * now.layout.world_size)
        estimator = Estimator(replace(scenario, cluster=larger))
        grown = [g for g in set(_grow(estimator.scenario, now.layout, factor)) if _fits(estimator, g, now.kernels)]
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


def find_moves(layout: Layout, batch: Batch, num_layers: int) -> Iterator[tuple[str, Layout]]:
    """Knob and layout of each single change on the same world, legal or not; some come twice."""
    for knob, partner in _TRADES:
        both = getattr(layout, knob) * getattr(layout, partner)
        for degree in divisors(both):
            yield knob, _settle(layout, {knob: degree, partner: both // degree})
    settings: dict[str, Iterable[Any]] = {
        "micro_batch": divisors(max(1, batch.global_batch // layout.dp)),
        "zero": _ZERO,
        "recompute": _RECOMPUTE,
        "sequence_parallel": (False, True) if layout.tp > 1 else (),
        "tp_overlap": (False, True) if layout.shards_sequence else (),
        "ep": divisors(layout.dp * layout.cp * layout.tp) if layout.ep > 1 else (),
        "stage_layers": ((),),
        "offload": OFFLOADS,
    }
    for knob, values in settings.items():
        for value in values:
            yield knob, replace(layout, **{knob: value})
    if layout.pp > 1:
        most = max(1, min(_MOST_VIRTUAL_STAGES, num_layers // layout.pp))
        for (name, schedule), v in product(SCHEDULES.items(), range(1, most + 1)):
            is_tried = schedule.is_searched or v == schedule.least_virtual_stages
            if is_tried and schedule.takes(layout.pp, v):
                yield "schedule", _settle(layout, {"schedule": name, "virtual_stages": v})


def find_overrides(old: tuple[Layout, Kernels | OpenKernels], new: tuple[Layout, Kernels]) -> tuple[str, ...]:
    """Arguments of train.py that run the new layout and kernels where the config has the old ones."""
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
    splits = [("stage_layers", cut) for cut in _find_splits(estimator, now)]
    for knob, moved in chain(find_moves(now.layout, batch, model.num_layers), splits):
        if knob == "offload" and estimator.scenario.is_on_host:  # which has one memory
            continue
        if moved not in tried and moved.is_legal(model, batch) and _fits(estimator, moved, now.kernels):
            yield _to_change(estimator, now, knob, moved, now.kernels)
        tried.add(moved)
    for knob, others in _other_kernels(now.kernels):
        if _fits(estimator, now.layout, others):
            yield _to_change(estimator, now, knob, now.layout, others)


def _find_splits(estimator: Estimator, now: Estimate) -> Iterator[Layout]:
    """Other numbers of blocks on its stages, where it has some, and not too many."""
    if 1 < now.layout.num_stages <= MOST_STAGES:
        yield balance_time(estimator, now.layout, now.kernels)
        yield balance_memory(estimator, now.layout, now.kernels)


def _grow(scenario: Scenario, layout: Layout, factor: int) -> Iterator[Layout]:
    """Legal layouts on `factor` (a power of 2) times the GPUs; tp stays among those that fast links join."""
    most_tp = max(layout.tp, scenario.cluster.gpus_linked)
    for tp, pp in product(divisors(factor), repeat=2):
        if factor % (tp * pp) or layout.tp * tp > most_tp:
            continue
        degrees = {"tp": layout.tp * tp, "pp": layout.pp * pp, "dp_shard": layout.dp_shard * (factor // (tp * pp))}
        for micro_batch in {1, layout.micro_batch}:
            grown = _settle(layout, {**degrees, "micro_batch": micro_batch})
            if grown.is_legal(scenario.model, scenario.batch):  # whatever ZeRO and recomputation
                yield from (replace(grown, zero=z, recompute=r) for z, r in product(_ZERO, _RECOMPUTE))


def _fits(estimator: Estimator, layout: Layout, kernels: Kernels) -> bool:
    """Whether the engine runs it and it fits on each rank and its host; time, which takes longer, is not looked at."""
    return (
        not find_refusals(estimator.scenario, layout, kernels)
        and estimator.memory(layout, kernels).peak_bytes <= estimator.capacity_bytes
        and estimator.fits_host(layout, kernels)
    )


def _other_kernels(kernels: Kernels) -> Iterator[tuple[str, Kernels]]:
    """Each kernel set otherwise, as far as that needs no package, whether it runs there or not."""
    own = [(kernel.operation, kernel.name) for kernel in list_kernels(Kernel) if not kernel.package]
    for knob, value in (*own, ("compile", "blocks"), ("compile", "none")):
        others = replace(kernels, **{knob: value})  # type: ignore[arg-type]
        if others != kernels:
            yield knob, others


def _to_change(estimator: Estimator, now: Estimate, knob: str, layout: Layout, kernels: Kernels) -> Change:
    overrides = find_overrides((now.layout, now.kernels), (layout, kernels))
    return Change(knob, overrides, estimator.estimate(layout, kernels))


def _settle(layout: Layout, changes: dict[str, Any]) -> Layout:
    """The changed layout without what only made sense before: a stage split, or a pipeline's schedule at pp = 1."""
    changed = replace(layout, **changes)
    if changed.pp == 1:
        changed = replace(changed, schedule=DEFAULT_SCHEDULE, virtual_stages=1)
    return changed if changed.num_stages == layout.num_stages else replace(changed, stage_layers=())
