"""Suggestions: choices that a search was not allowed to make and that would pay, and edges near its best layout.

Each function returns one sentence or none, and costs a narrow search or a few estimates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd, inf

from dtlayout.base.formatting import GIB, join_alike, three_digits
from dtlayout.costmodel.engine import OWN_ENGINE
from dtlayout.costmodel.estimate import Estimate, Estimator
from dtlayout.costmodel.scenario import find_refusals, find_unsupported
from dtlayout.planner.coarse_state import MEANING, find_coarse_state
from dtlayout.planner.fine_tuning import list_fine_tunings
from dtlayout.planner.neighbours import has_splits, with_schedule
from dtlayout.planner.search import Search
from dtlayout.planner.space import Space
from dtlayout.planner.stage_balance import balance_memory, balance_time
from dtlayout.schedules.record import PipelineSchedule
from dtlayout.schedules.schedules import SCHEDULES
from dtlayout.spec.layout import Layout

LEAST_FACTOR = 1.1
"""Factor by which a choice has to make a step faster to be worth a sentence."""
_BATCH_RANGE = 0.1
"""Fraction of the global batch within which another one is looked for."""
_SLOWER_NETWORK = 0.8
"""Share of the network's bandwidth with which a step is predicted once more."""
_LEAST_GROWTH = 0.03
"""Fraction by which the slower network has to make the step longer to be worth a sentence."""
_LEAST_GAIN = 0.01
"""Share of the step that another split or schedule has to save."""
_HIDDEN = 0.05
"""Share of the step up to which communication counts as hidden, with what it costs to hide it."""
_LEAST_ROOM = 0.05
"""Share of the capacity that a peak should leave free: about the median error of predicted peaks."""
LOOKED_AT = 5
"""Number of best layouts that are looked at, however many are shown."""
_MORE_ROOM = 0.1
"""Share of the capacity that is left free instead, if a peak leaves less."""


def list_remarks(search: Search, ranked: Sequence[Estimate], *, has_room: bool = True) -> Iterator[str]:
    """All suggestions for a search, by the first `LOOKED_AT` of its best layouts; there is at least one.

    `has_room` is False where it is known that no layout leaves more memory free.
    """
    ranked = ranked[:LOOKED_AT]
    yield from filter(None, (
        remark_on_axis(search, ranked[0]), remark_on_precision(search, ranked), remark_on_batch(search, ranked[0]),
        remark_on_network(search, ranked[0]), has_room and remark_on_room(search, ranked),
        remark_on_split(search, ranked[0]),
        remark_on_schedule(search, ranked[0]),
    ))  # fmt: skip


def list_ways_to_fit(search: Search, missed: Estimate) -> Iterator[str]:
    """Suggestions of layouts that fit, for a search in which none does; `missed` is the one that misses by least."""
    yield from filter(None, (
        remark_on_axis(search, None), remark_on_split(search, missed), remark_on_schedule(search, missed),
        remark_on_state(search), remark_on_offload(search, missed), remark_on_fine_tuning(search),
    ))  # fmt: skip


def remark_on_axis(search: Search, best: Estimate | None, axis: str = "cp") -> str:
    """A sentence on the worth of an axis that the engine does not have; `best` is None if nothing fits without it.

    No axis makes a step shorter than the time that it computes.
    """
    space, lacks = search.space, f"without {axis}, which {search.space.scenario.engine.name} does not have"
    if space.has_axis(axis) or axis in space.fixed:
        return ""
    if best and best.step_time_s < LEAST_FACTOR * best.time.compute:
        return ""
    kernels = vars(best.kernels) if best else {}
    fixed = {**kernels, "micro_batch": 1, **space.fixed}
    granted = Space(space.scenario, fixed, {**space.avoided, axis: [1]}, granted=(axis,))
    found = next(iter(Search(granted, search.max_memory).run(top=1).ranked), None)
    if found is None:
        return ""
    if best is None:
        return f"This is {lacks}: {found.layout} would fit."
    factor = best.step_time_s / found.step_time_s
    if factor < LEAST_FACTOR:
        return ""
    step = f"{three_digits(found.step_time_s)} s a step"
    return f"This is {lacks} yet: {found.layout} would be {factor:.1f} times as fast, {step}."


def remark_on_state(search: Search) -> str:
    """A sentence on a layout that fits if the optimizer's state is in bf16."""
    if (coarse := find_coarse_state(search.space.scenario)) is None:
        return ""
    for best in Search(replace(search.space, scenario=coarse.scenario), search.max_memory).run(top=1).ranked:
        return f"{coarse.option} {MEANING}: {best.layout} would fit, {three_digits(best.step_time_s)} s a step."
    return ""


def remark_on_offload(search: Search, missed: Estimate) -> str:
    """A sentence on a layout that fits with the host's memory or its disk, if none does without; the disk comes last.

    `missed` is the layout that misses by least.
    An offload is tried, with the smallest microbatches, if it takes as many bytes off `missed` as are lacking.
    """
    space, fullest = search.space, max(missed.memory, key=lambda rank: rank.needed)
    if "offload" in space.fixed:
        return ""
    lacking = fullest.needed - search.allowed_bytes
    others = fullest.total - fullest.activations
    fixed = {"micro_batch": 1, "schedule": "1f1b", **space.fixed}
    ways = {"activations": fullest.activations, "optimizer": others, "both": fullest.total, "disk": others}
    for name, size in ways.items():
        if size < lacking or find_unsupported(space.scenario, Layout(offload=name)):  # type: ignore[arg-type]
            continue
        for best in search.with_fixed({**fixed, "offload": name}).run(top=1).ranked:
            return (
                f"With --fix offload={name} {best.layout} would fit, {three_digits(best.step_time_s)} s a step, "
                f"with {max(best.host_bytes) / GIB:.0f} GiB of the host's memory for a GPU{_describe_disk(best)}."
            )
    return ""


def _describe_disk(estimate: Estimate) -> str:
    """The bytes that lie on disk, as the end of a sentence; empty where there are none."""
    return f" and {max(estimate.disk_bytes) / GIB:.0f} GiB of its disk" if estimate.disk_bytes else ""


def remark_on_fine_tuning(search: Search) -> str:
    """A sentence on a layout that fits if less is trained, in the cheapest way to do so; it comes last of all."""
    for way in list_fine_tunings(search.space.scenario):
        for best in Search(replace(search.space, scenario=way.scenario), search.max_memory).run(top=1).ranked:
            return (
                f"To fine-tune, {' '.join(way.options)} {way.meaning}: {best.layout} would fit, "
                f"{three_digits(best.step_time_s)} s a step."
            )
    return ""


def remark_on_split(search: Search, estimate: Estimate) -> str:
    """A sentence on another split of blocks over stages, for the fastest layout or the one that misses by least."""
    layout, kernels, estimator = estimate.layout, estimate.kernels, search.estimator
    if not has_splits(layout) or "stage_layers" in search.space.fixed:
        return ""
    balance = balance_time if search.has_room(estimate) else balance_memory
    found = estimator.estimate(balance(estimator, layout, kernels), kernels)
    if find_refusals(search.space.scenario, found.layout, kernels) or not (would := _say_gain(search, estimate, found)):
        return ""
    return (
        f"{layout} has {join_alike(estimate.stage_layers)} blocks by stage: with "
        f"stage_layers={list(found.stage_layers)} it would {would}."
    )


def remark_on_schedule(search: Search, estimate: Estimate) -> str:
    """A sentence on a schedule of our trainer that no search tries, for the fastest layout or the one that misses by
    least. Everything else that is fixed or ruled out stays so."""
    if not estimate.layout.is_pipelined or search.space.scenario.engine.name != OWN_ENGINE:
        return ""
    others = [each for each in SCHEDULES.values() if not each.is_searched]
    found = [other for each in others if (other := _with_schedule(search, estimate, each))]
    if not found or not (would := _say_gain(search, estimate, best := min(found, key=lambda e: e.step_time_s))):
        return ""
    eager = " without compile" if best.kernels.compile != estimate.kernels.compile else ""
    asked = f"--fix schedule={best.layout.schedule}"
    return f"{best.layout}{eager} would {would}: no search tries that schedule unless it is asked for, {asked}."


def _with_schedule(search: Search, estimate: Estimate, schedule: PipelineSchedule) -> Estimate | None:
    """The estimate of a layout in another schedule, with the kernels and tp_overlap that this allows.

    None if a user has ruled it out, if it is refused or does not fit, or if it could not be faster than a layout that
    fits, even without a bubble.
    """
    scenario = search.space.scenario
    layout, kernels = with_schedule(estimate.layout, estimate.kernels, schedule)
    is_legal = search.space.has(layout, kernels) and layout.is_legal(scenario.model, scenario.batch)
    if not is_legal or find_refusals(scenario, layout, kernels):
        return None
    if search.has_room(estimate):
        least_s = search.estimator.lower_bound_s(layout, kernels)
        if least_s > (1 - _LEAST_GAIN) * estimate.step_time_s:
            return None
    # To play its pipeline takes longest.
    return search.estimator.estimate(layout, kernels) if search.fits(layout, kernels) else None


def _say_gain(search: Search, estimate: Estimate, other: Estimate) -> str:
    """The gain of another layout, in words: it is faster, or fits where the first does not; "" for no gain."""
    gain = 1 - other.step_time_s / estimate.step_time_s
    fits = search.has_room(estimate)
    if not search.has_room(other) or (fits and gain < _LEAST_GAIN):
        return ""
    return f"{f'be {gain:.1%} faster' if fits else 'fit'}, {three_digits(other.step_time_s)} s a step"


def remark_on_precision(search: Search, ranked: Sequence[Estimate]) -> str:
    """A sentence on the worth of the fastest format below bf16 that engine and GPU have."""
    scenario = search.space.scenario
    if scenario.engine.name == OWN_ENGINE or scenario.precision.multiplies_in != "bfloat16":
        return ""
    faster = list[tuple[float, str, Estimate]]()
    for name in scenario.engine.features.matmuls:
        precision = replace(scenario.precision, matmuls=name)
        if scenario.cluster.gpu.peak_of(precision.matmul_format):  # type: ignore[arg-type]
            estimator = Estimator(replace(scenario, precision=precision))
            found = [estimator.estimate(each.layout, each.kernels) for each in ranked]
            faster += [(e.step_time_s, name, e) for e in found if search.has_room(e)]
    # By the time alone: estimates of layouts that take equally long have no order.
    time_s, name, estimate = min(faster, key=lambda each: each[0], default=(inf, "", ranked[0]))
    if (factor := ranked[0].step_time_s / time_s) < LEAST_FACTOR:
        return ""
    return (
        f"All layouts above multiply in bf16: {estimate.layout} with {name} would be {factor:.2f} times as fast, "
        f"{three_digits(time_s)} s a step; that changes the numerics, so ask for it with --precision matmuls={name}."
    )


def remark_on_batch(search: Search, best: Estimate) -> str:
    """A sentence on a global batch near the asked one that has more divisors in common with the number of GPUs."""
    space, batch = search.space, search.space.scenario.batch
    num_gpus, size = space.scenario.cluster.num_gpus, batch.global_batch
    around = range(max(1, round(size * (1 - _BATCH_RANGE))), round(size * (1 + _BATCH_RANGE)) + 1)
    near = min(around, key=lambda n: (-gcd(n, num_gpus), abs(n - size)))
    if gcd(near, num_gpus) <= gcd(size, num_gpus):
        return ""
    other = replace(space, scenario=replace(space.scenario, batch=replace(batch, global_batch=near)))
    found = next(iter(Search(other, search.max_memory).run(top=1).ranked), None)
    if found is None or (factor := (best.step_time_s / size) / (found.step_time_s / near)) < LEAST_FACTOR:
        return ""
    return (
        f"A global batch of {near} divides better among {num_gpus} GPUs than {size}: {found.layout} would train "
        f"{factor:.1f} times as many tokens a second."
    )


def remark_on_network(search: Search, best: Estimate) -> str:
    """A warning if a slightly slower network would no longer hide the data-parallel communication of the best."""
    scenario = search.space.scenario
    gpu = scenario.cluster.gpu
    if scenario.is_on_host or best.time.dp > _HIDDEN * best.step_time_s:
        return ""
    slower = replace(gpu, network_bytes_per_s=_SLOWER_NETWORK * gpu.network_bytes_per_s)
    cluster = replace(scenario.cluster, gpu=slower)
    found = Estimator(replace(scenario, cluster=cluster)).estimate(best.layout, best.kernels)
    growth = (found.time.dp - best.time.dp) / best.step_time_s
    if growth < _LEAST_GROWTH:
        return ""
    return (
        f"Data-parallel communication of 1 is hidden only just: on a network {1 - _SLOWER_NETWORK:.0%} slower than "
        f"predicted the step would be {growth:.1%} longer."
    )


def remark_on_room(search: Search, ranked: Sequence[Estimate]) -> str:
    """A sentence on the cost of more free memory, if the best fills nearly all and the user set no limit.

    Only layouts with the degrees of a ranked one and the kernels of the best are tried, so the cost is an upper bound.
    """
    best = ranked[0]
    free_bytes = best.capacity_bytes - best.peak_bytes
    if search.max_memory < 1 or free_bytes >= _LEAST_ROOM * best.capacity_bytes:
        return ""
    room = f"{free_bytes / GIB:.1f} of {best.capacity_bytes / GIB:.1f} GiB"
    said = f"1 leaves {room} free, and predicted peaks are not that exact"
    degrees = dict.fromkeys(tuple((name, getattr(e.layout, name)) for name in ("tp", "pp", "cp", "ep")) for e in ranked)
    kernels, fixed = vars(best.kernels), search.space.fixed
    roomy = [search.with_fixed({**kernels, **dict(kept), **fixed}, 1 - _MORE_ROOM) for kept in degrees]
    found = [estimate for each in roomy for estimate in each.run(top=1).ranked]
    found += [e for e in ranked if e.needed_bytes <= (1 - _MORE_ROOM) * best.capacity_bytes]
    if not found:
        return f"{said}: look at what --max-memory {1 - _MORE_ROOM:g} finds."
    fastest = min(found, key=lambda e: e.step_time_s)
    cost = fastest.step_time_s / best.step_time_s - 1
    longer = f"at most {cost:.1%} longer" if cost >= 0.0005 else "no longer"
    return f"{said}: with --max-memory {1 - _MORE_ROOM:g} a step takes {longer}, as {fastest.layout}."
