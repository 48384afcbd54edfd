"""Offload: bytes in the host's memory and on its disk, and the seconds of copies that nothing hides.

L the link's bytes/s in one direction, M the host's memory bandwidth for one GPU, D the disk's bandwidth over the ranks
of a node, n parameters of a rank, S ranks that share their state, p bytes of a master, o bytes of an optimizer's state
for a parameter, m microbatches.

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

With the state on disk, masters are read at D before they are copied, p·n/S as often as parameters are gathered: a unit
is read while the one before is copied and gathered, so the slower of the two counts. An update reads and writes
(p + o)·n/S at D beside the host's update of other units, so again the slower one counts. ZeRO-Infinity:
arXiv:2104.07857.

Left out: that GPUs of a node share the host's processors with data loading, and what pinned memory is rounded up to. Of
the disk, the first unit's reading and the last one's writing, and the pages of at most three units (plans/disk.py),
which lie in the cache of the host's kernel.
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from dtlayout.costmodel.cache_keys import StageLayout
from dtlayout.costmodel.forward_only import find_differentiated
from dtlayout.costmodel.fsdp2.sizes import Sizes
from dtlayout.costmodel.parameter_groups import NONE_APART, Apart, list_trained
from dtlayout.costmodel.scenario import Scenario, count_reductions, count_state_shards, leaves_frozen_whole
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


class RankParameters(NamedTuple):
    """Parameters of a pipeline rank."""

    number: float
    """All of them."""
    apart: Apart = NONE_APART
    """Parameters that the scenario's own optimizer does not update."""
    of_experts: float = 0.0
    """Parameters of experts among all."""


def host_capacity_bytes(scenario: Scenario) -> float:
    """Bytes of its host's memory that a rank may take beside a GPU; infinite where they are not known."""
    memory_bytes = scenario.cluster.gpu.host_memory_bytes
    if memory_bytes is None or scenario.is_on_host:
        return inf
    gpu, per_node = scenario.cluster.gpu, min(scenario.cluster.gpus_per_node, scenario.cluster.num_gpus)
    return _HOST_SHARE * memory_bytes * max(1.0, gpu.gpus_per_node / per_node)  # fewer GPUs share the vendor's server


def state_on_host_bytes(
    scenario: Scenario, layout: Layout, num_parameters: float, apart: Apart = NONE_APART, of_experts: float = 0.0
) -> float:
    """Bytes of a rank's state in its host's memory: gradients and, unless they are on disk, masters and the optimizer's
    state.

    Frozen parameters have neither gradients nor state, and lie in the compute format. `of_experts` of all parameters
    are experts'.
    """
    if not layout.offloads_state:
        return 0.0
    gradients = _trained_bytes(scenario, layout, num_parameters, apart, of_experts, keeps_state=False)
    if layout.has_state_on_disk:
        return gradients
    return gradients + _kept_bytes(scenario, layout, num_parameters, apart, of_experts)


def state_on_disk_bytes(
    scenario: Scenario, layout: Layout, num_parameters: float, apart: Apart = NONE_APART, of_experts: float = 0.0
) -> float:
    """Bytes of a rank's state on its host's disk: masters, frozen parameters and the optimizer's state."""
    return _kept_bytes(scenario, layout, num_parameters, apart, of_experts) if layout.has_state_on_disk else 0.0


def copied_state_bytes(
    scenario: Scenario, layout: Layout, num_parameters: float, apart: Apart = NONE_APART, of_experts: float = 0.0
) -> float:
    """Bytes of the copy of a rank's state that is saved while training goes on; a state on disk is not copied."""
    if layout.has_state_on_disk:
        return 0.0
    return _trained_bytes(scenario, layout, num_parameters, apart, of_experts, keeps_state=True)


def _kept_bytes(scenario: Scenario, layout: Layout, num_parameters: float, apart: Apart, of_experts: float) -> float:
    """Bytes of a rank's state from step to step: masters, frozen parameters and the optimizer's state."""
    trained = _trained_bytes(scenario, layout, num_parameters, apart, of_experts, keeps_state=True)
    return trained + _frozen_bytes(scenario, layout, apart)


def _frozen_bytes(scenario: Scenario, layout: Layout, apart: Apart) -> float:
    """Bytes of a rank's shard of frozen parameters, as they are stored; 0 where the device keeps them whole."""
    if leaves_frozen_whole(scenario, layout):
        return 0.0
    held = apart.frozen.shard(layout) - apart.spared / count_state_shards(layout)
    return BYTES[scenario.precision.compute] * held


def _trained_bytes(
    scenario: Scenario, layout: Layout, num_parameters: float, apart: Apart, of_experts: float, *, keeps_state: bool
) -> float:
    """Bytes of a rank's trained parameters in their own format, with the optimizer's state of them or without."""
    params = BYTES[scenario.precision.params]
    return sum(
        (params + optimizer.state_bytes(params) * keeps_state) * own.shard(layout)
        for optimizer, own in list_trained(scenario.optimizer, num_parameters, of_experts, apart)
    )


def host_bytes(
    scenario: Scenario,
    layout: Layout,
    kernels: Kernels,
    stages: Sequence[StageSlice],
    num_parameters: Sequence[RankParameters],
) -> tuple[float, ...]:
    """The most bytes that each pipeline rank has in its host's memory.

    `num_parameters` has each rank's.
    """
    held = [state_on_host_bytes(scenario, layout, *own) for own in num_parameters]
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
    num_parameters: Sequence[RankParameters],
) -> float:
    """Seconds of copies in a step, of the rank whose link to its host copies longest.

    Both directions are added up, and copies that something hides count too. `num_parameters` is that of `host_bytes`.
    """
    m, longest_s = max(1, layout.num_microbatches(scenario.batch)), 0.0
    for rank, own in enumerate(num_parameters):
        seconds = 0.0
        if layout.offloads_activations:
            whole_s, kept_s = kept_copy_s(scenario, layout, kernels)
            chunks = layout.placement.take(stages, rank)
            layers = [layer for chunk in chunks for layer in find_differentiated(scenario.model, chunk)]
            covered = Recompute.parse(layout.recompute)
            seconds += 2 * m * sum(kept_s if covered.covers(layer) else whole_s for layer in layers)
        if layout.offloads_state:
            gathers, reductions = (2 * m if layout.zero == 3 else 1), count_reductions(scenario, layout, m)
            times = state_times(scenario, layout, *own)
            seconds += reductions * times.gradients_s + gathers * times.masters_s
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


def disk_pass_s(scenario: Scenario, nbytes: float) -> float:
    """Seconds in which a rank reads or writes so many bytes of its host's disk, while all ranks of the node do."""
    cluster = scenario.cluster
    return nbytes * min(cluster.gpus_per_node, cluster.num_gpus) / (cluster.gpu.disk_bytes_per_s or inf)


def on_disk_s(scenario: Scenario, layout: Layout, num_parameters: Sequence[RankParameters]) -> float:
    """Seconds of a step in which the disk reads and writes for a rank, of the rank with most; 0 without a disk.

    `num_parameters` is that of `host_bytes`.
    """
    if not layout.has_state_on_disk:
        return 0.0
    gathers = 2 * max(1, layout.num_microbatches(scenario.batch)) if layout.zero == 3 else 1
    times = (state_times(scenario, layout, *own) for own in num_parameters)
    return max(gathers * each.reading_s + each.exchanging_s for each in times)


def exposed_s(scenario: Scenario, copying_s: float, computing_s: float) -> float:
    """Seconds of copies that a stage's blocks do not hide while they compute."""
    return copying_s if scenario.is_on_host else max(0.0, copying_s - computing_s)


def host_pass_s(scenario: Scenario, nbytes: float) -> float:
    """Seconds in which the host reads or writes so many bytes of its memory for one rank, while all ranks do."""
    gpu = scenario.cluster.gpu
    speed = gpu.memory_bytes_per_s if scenario.is_on_host else gpu.host_memory_bytes_per_s
    return nbytes / (speed or inf)


class StateTimes(NamedTuple):
    """Seconds for a rank's shard of parameters, each as if nothing ran beside it."""

    masters_s: float
    """Masters are copied to the device."""
    gradients_s: float
    """Gradients are copied to the host."""
    adding_s: float
    """Gradients are added to those of other microbatches on the host."""
    updating_s: float
    """The host's processors update."""
    reading_s: float
    """Masters are read from the disk; 0 where they are in memory."""
    exchanging_s: float
    """An update's state is read from the disk and written to it; 0 where it is in memory."""


def state_times(
    scenario: Scenario, layout: Layout, n: float, apart: Apart = NONE_APART, of_experts: float = 0.0
) -> StateTimes:
    """Seconds for the shard of n parameters, `of_experts` of which are experts'."""
    params = BYTES[scenario.precision.params]
    gradients = _trained_bytes(scenario, layout, n, apart, of_experts, keeps_state=False)
    masters = gradients + _frozen_bytes(scenario, layout, apart)
    masters_s = 0.0 if scenario.is_on_host else copy_s(scenario, masters)
    gradients_s = 0.0 if scenario.is_on_host else copy_s(scenario, gradients)
    adding_s = gradients_s + host_pass_s(scenario, 3 * gradients)
    moved = (
        own.shard(layout) * (optimizer.update_bytes + _GRADIENT_PASSES * params)
        for optimizer, own in list_trained(scenario.optimizer, n, of_experts, apart)
    )
    reading_s = exchanging_s = 0.0
    if layout.has_state_on_disk:
        reading_s = disk_pass_s(scenario, masters)
        exchanging_s = disk_pass_s(
            scenario, 2 * _trained_bytes(scenario, layout, n, apart, of_experts, keeps_state=True)
        )
    return StateTimes(masters_s, gradients_s, adding_s, host_pass_s(scenario, sum(moved)), reading_s, exchanging_s)
