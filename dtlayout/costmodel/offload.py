"""Offload: bytes in the host's memory, and the seconds of copies over its link that nothing hides.

L the link's bytes/s in one direction, M the host's memory bandwidth for one GPU, n parameters of a rank, S ranks that
share their state, p bytes of a master, m microbatches.

| copied | how often | hidden behind |
|---|---|---|
| what a block keeps, to the host | each forward | the next block's forward, or what follows the last one |
| the same, back | each backward | the backward of the block before it in backward |
| masters, p·n/S, to the device | as often as parameters are gathered | as gathering them |
| gradients, p·n/S, to the host | as often as they are reduced | as reducing them |

A copy that takes longer than what hides it is waited for, as long as it takes longer. Gradients that are added to those
of other microbatches on the host are waited for (torch's fsdp/_fully_shard), and so is the update there, which moves
all that the optimizer reads and writes, and the gradients three times, for norm and clipping, at M. On a CPU a copy is
a pass over its memory, behind which nothing hides. ZeRO-Offload: arXiv:2101.06840.

Left out: that GPUs of a node share the host's processors with data loading, and what pinned memory is rounded up to.
"""

from collections.abc import Sequence
from math import inf

from dtlayout.costmodel.cache_keys import StageLayout
from dtlayout.costmodel.forward_only import find_differentiated
from dtlayout.costmodel.fsdp2.sizes import Sizes
from dtlayout.costmodel.parameter_groups import NONE_APART, Apart, list_trained
from dtlayout.costmodel.scenario import Scenario, count_state_shards
from dtlayout.pipelining.partition import StageSlice
from dtlayout.pipelining.timing import in_flight_peaks, weigh_moments
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import BYTES
from dtlayout.spec.recompute import Recompute

_GRADIENT_PASSES = 3
"""Passes over the gradients on the host: the norm reads, clipping reads and writes."""
_HOST_SHARE = 0.9
"""Share of the host's memory that training may take; the rest is for the system, batches and each rank's libraries."""


def host_capacity_bytes(scenario: Scenario) -> float:
    """Bytes of its host's memory that a rank may take beside a GPU; infinite where they are not known."""
    memory_bytes = scenario.cluster.gpu.host_memory_bytes
    if memory_bytes is None or scenario.is_on_host:
        return inf
    gpu, per_node = scenario.cluster.gpu, min(scenario.cluster.gpus_per_node, scenario.cluster.num_gpus)
    return _HOST_SHARE * memory_bytes * max(1.0, gpu.gpus_per_node / per_node)  # fewer GPUs share the vendor's server


def state_on_host_bytes(scenario: Scenario, layout: Layout, num_parameters: float, apart: Apart = NONE_APART) -> float:
    """Bytes of a rank's state in its host's memory: masters, gradients and the optimizer's state.

    Frozen parameters have neither gradients nor state, and lie in the compute format.
    """
    if not layout.offloads_state:
        return 0.0
    params = BYTES[scenario.precision.params]
    held = BYTES[scenario.precision.compute] * apart.stored / count_state_shards(layout)
    for optimizer, own in list_trained(scenario.optimizer, num_parameters, 0.0, apart):
        each = 2 * params + optimizer.state_bytes(params)  # a master and its gradient
        held += each * own.total / count_state_shards(layout)
    return held


def host_bytes(
    scenario: Scenario,
    layout: Layout,
    kernels: Kernels,
    stages: Sequence[StageSlice],
    num_parameters: Sequence[tuple[float, Apart]],
) -> tuple[float, ...]:
    """The most bytes that each pipeline rank has in its host's memory.

    `num_parameters` has each rank's, and those that stand apart.
    """
    held = [state_on_host_bytes(scenario, layout, n, apart) for n, apart in num_parameters]
    if layout.offloads_activations:
        sizes, recompute = Sizes(scenario, layout, kernels), Recompute.parse(layout.recompute)
        m = max(1, layout.num_microbatches(scenario.batch))
        for rank in range(layout.pp):
            chunks = layout.placement.take(stages, rank)
            layers = [find_differentiated(scenario.model, chunk) for chunk in chunks]
            kept = [sum(sizes.kept(recompute, layer) for layer in each) for each in layers]
            peaks = in_flight_peaks(layout.schedule, layout.pp, layout.virtual_stages, m, rank)
            last = layers[-1][-1:]  # which never left, or has come back for the next backward
            held[rank] += max(weigh_moments(peaks, kept)) - sum(sizes.kept(recompute, layer) for layer in last)
    return tuple(held)


def copied_s(
    scenario: Scenario,
    layout: Layout,
    kernels: Kernels,
    stages: Sequence[StageSlice],
    num_parameters: Sequence[tuple[float, Apart]],
) -> float:
    """Seconds of copies in a step, of the rank whose link to its host copies longest.

    Both directions are added up, and copies that something hides count too. `num_parameters` is that of `host_bytes`.
    """
    m, longest_s = max(1, layout.num_microbatches(scenario.batch)), 0.0
    for rank, (n, apart) in enumerate(num_parameters):
        seconds = 0.0
        if layout.offloads_activations:
            whole_s, kept_s = kept_copy_s(scenario, layout, kernels)
            chunks = layout.placement.take(stages, rank)
            layers = [layer for chunk in chunks for layer in find_differentiated(scenario.model, chunk)]
            covered = Recompute.parse(layout.recompute)
            seconds += 2 * m * sum(kept_s if covered.covers(layer) else whole_s for layer in layers)
        if layout.offloads_state:
            gathers, reductions = (2 * m if layout.zero == 3 else 1), (m if layout.zero > 1 else 1)
            masters_s, gradients_s, *_ = state_times(scenario, layout, n, apart)
            seconds += (gathers + reductions) * gradients_s + gathers * (masters_s - gradients_s)
        longest_s = max(longest_s, seconds)
    return longest_s


def copy_s(scenario: Scenario, nbytes: float) -> float:
    """Seconds of a copy between the device and its host; 0 where the link's speed is not known."""
    if scenario.is_on_host:
        return 2 * nbytes / scenario.cluster.gpu.memory_bytes_per_s
    return nbytes / (scenario.cluster.gpu.host_link_bytes_per_s or inf)


def kept_copy_s(scenario: Scenario, layout: Layout | StageLayout, kernels: Kernels) -> tuple[float, float]:
    """Seconds of copying what a block keeps, in one direction: without recomputation, and with it."""
    sizes, recompute = Sizes(scenario, layout, kernels), Recompute.parse(layout.recompute)  # type: ignore[arg-type]
    kept = sizes.kept(recompute, recompute.every - 1) if recompute.every else sizes.block
    return copy_s(scenario, sizes.block), copy_s(scenario, kept)


def exposed_s(scenario: Scenario, copying_s: float, computing_s: float) -> float:
    """Seconds of copies that a stage's blocks do not hide while they compute."""
    return copying_s if scenario.is_on_host else max(0.0, copying_s - computing_s)


def host_pass_s(scenario: Scenario, nbytes: float) -> float:
    """Seconds in which the host reads or writes so many bytes of its memory for one rank, while all ranks do."""
    gpu = scenario.cluster.gpu
    speed = gpu.memory_bytes_per_s if scenario.is_on_host else gpu.host_memory_bytes_per_s
    return nbytes / (speed or inf)


def state_times(
    scenario: Scenario, layout: Layout, n: float, apart: Apart = NONE_APART
) -> tuple[float, float, float, float]:
    """Seconds for the shard of n parameters: copying the masters, copying the gradients, adding these to others on the
    host, and the update there."""
    params, shards = BYTES[scenario.precision.params], count_state_shards(layout)
    trained = (n - apart.frozen.total) / shards
    masters = params * trained + BYTES[scenario.precision.compute] * apart.stored / shards
    masters_s = 0.0 if scenario.is_on_host else copy_s(scenario, masters)
    gradients_s = 0.0 if scenario.is_on_host else copy_s(scenario, params * trained)
    adding_s = gradients_s + host_pass_s(scenario, 3 * params * trained)
    moved = (
        own.total / shards * (optimizer.update_bytes + _GRADIENT_PASSES * params)
        for optimizer, own in list_trained(scenario.optimizer, n, 0.0, apart)
    )
    return masters_s, gradients_s, adding_s, host_pass_s(scenario, sum(moved))
