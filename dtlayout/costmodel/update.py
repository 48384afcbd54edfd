"""Update: the end of a step, when gradients are reduced, parameters gathered and updated."""

from collections.abc import Iterable
from operator import add
from typing import NamedTuple

from dtlayout.costmodel.comm import data_link, half_all_reduce_s, tp_link
from dtlayout.costmodel.memory import count_head_parameters
from dtlayout.costmodel.muon import iteration_s
from dtlayout.costmodel.offload import state_times
from dtlayout.costmodel.operators import pass_s
from dtlayout.costmodel.parameter_groups import NONE_APART, Apart, list_trained
from dtlayout.costmodel.scenario import (
    Scenario,
    activation_size,
    count_expert_shards,
    count_reductions,
    count_state_shards,
    gathers_weights_cast,
    leaves_frozen_whole,
    saved_by_casts,
)
from dtlayout.plans.plan import has_plain_matmuls, has_sums
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import BYTES

_GRADIENT_TRAFFIC_BYTES = 12
"""Read and written for each parameter of the stage: gradients cast and their norm, weights cast back."""


_CAST_TRAFFIC_BYTES = 31
"""Read and written for each parameter of a shard that is cast to fp8, by way of the compute format and fp32, and once
more for its largest magnitude."""
_MAXIMUM_BYTES = 4


class Update(NamedTuple):
    """Seconds of each thing that a rank does once for its parameters, whatever hides it."""

    reduce_s: float
    """Gradients are summed over the ranks that share the state."""
    copy_s: float
    """Shards of gradients are summed over the replicas."""
    gather_s: float
    """Parameters are gathered."""
    recompute_s: float
    """Parameters are gathered for a backward; 0 where they are there."""
    optimizer_s: float
    """The optimizer updates them."""
    add_s: float = 0.0
    """The host adds gradients of one microbatch to those of others, which the device waits for."""
    exchange_s: float = 0.0
    """Parts of matrices go to the ranks that iterate them, and come back; nothing hides it."""
    sum_s: float = 0.0
    """The device adds the gradients of one microbatch to the sum of those before, in every microbatch."""


def find_update(
    scenario: Scenario, layout: Layout, n: float, *, has_head: bool, of_experts: float = 0.0, apart: Apart = NONE_APART
) -> Update:
    """The update of n parameters: `of_experts` of them are experts', and `has_head` says whether the head's are there.

    Frozen ones, which `apart` counts, are gathered alone.
    """
    everywhere, traffic, summed, iterating_s, exchange_s = n - of_experts, 0.0, 0.0, 0.0, 0.0
    for optimizer, own in list_trained(scenario.optimizer, n, of_experts, apart):
        update_bytes = 0 if layout.offloads_state else optimizer.update_bytes  # by the device
        traffic += own.everywhere * (_GRADIENT_TRAFFIC_BYTES + update_bytes / count_state_shards(layout))
        if own.of_experts:
            traffic += own.of_experts * (_GRADIENT_TRAFFIC_BYTES + update_bytes / count_expert_shards(layout))
        summed += own.everywhere
        of_part = iteration_s(scenario, layout, optimizer, own)
        iterating_s, exchange_s = iterating_s + of_part[0], exchange_s + of_part[1]
    keeps_head = has_head and scenario.engine.features.sharding == "fsdp2"
    head = count_head_parameters(scenario.model, layout.tp) if has_head else 0.0
    frozen = apart.frozen
    # In parameters of the compute format, as what a quantized base spares.
    by_casts = apart.scaled * saved_by_casts(scenario) / activation_size(scenario)
    alike = frozen.everywhere, apart.spared + by_casts
    once: Iterable[float] = _once_s(scenario, layout, everywhere, head, *alike, keeps_head=keeps_head)
    if of_experts:
        once = map(add, once, _experts_once_s(scenario, layout, of_experts, frozen.of_experts))
    reduce_s, copy_s, gather_s, recompute_s = once
    if apart.scaled and gathers_weights_cast(scenario):
        casting_s, finding_s = _cast_times(scenario, layout, apart.scaled)
        gather_s, exchange_s = gather_s + casting_s, exchange_s + finding_s
        recompute_s += casting_s if layout.zero == 3 else 0.0
    optimizer_s, adding_s = pass_s(scenario, traffic) + iterating_s, 0.0
    if layout.offloads_state:
        times = state_times(scenario, layout, n, apart, of_experts)
        reduce_s, adding_s = reduce_s + times.gradients_s, times.adding_s
        gather_s = max(gather_s + times.masters_s, times.reading_s)
        recompute_s = max(recompute_s + times.masters_s, times.reading_s) if layout.zero == 3 else 0.0
        optimizer_s = max(optimizer_s + times.updating_s, times.exchanging_s)
    sum_s = pass_s(scenario, _gradient_size(scenario) / 4 * _sum_traffic_bytes(scenario, layout) * summed)
    return Update(reduce_s, copy_s, gather_s, recompute_s, optimizer_s, adding_s, exchange_s, sum_s)


def _sum_traffic_bytes(scenario: Scenario, layout: Layout) -> float:
    """Bytes moved for a parameter whose microbatch's gradient is added to a sum in fp32, by a matmul or a pass.

    A matmul that tp overlaps adds nothing, which is left out: its pass moves two bytes more.
    """
    constants = scenario.engine.constants
    by_matmuls = scenario.engine.features.adds_in_matmuls and has_sums(layout)
    if by_matmuls and has_plain_matmuls(scenario.precision):
        return constants.matmul_sum_traffic_bytes
    return constants.gradient_traffic_bytes


def _cast_times(scenario: Scenario, layout: Layout, scaled: float) -> tuple[float, float]:
    """Seconds of casting a rank's shard of so many parameters before each gather, and of finding its scales once a
    step: an all-reduce over the shards, and one over tp (plans/cast_gather.py)."""
    shards = count_state_shards(layout)
    over_shards_s = half_all_reduce_s(_MAXIMUM_BYTES, shards, data_link(scenario, layout, layout.tp, shards))
    over_tp_s = half_all_reduce_s(_MAXIMUM_BYTES, layout.tp, tp_link(scenario, layout)) if layout.tp > 1 else 0.0
    return pass_s(scenario, _CAST_TRAFFIC_BYTES * scaled / shards), 2 * (over_shards_s + over_tp_s)


def update_times(
    scenario: Scenario, layout: Layout, update: Update, num_layers: int, m: int, forward_s: float, backward_s: float
) -> tuple[float, float]:
    """Seconds of exposed data-parallel communication and of sums and updates, on a rank of so many blocks.

    m microbatches of so many seconds hide what can be hidden.
    """
    dp_s = _data_parallel_s(scenario, layout, update, m, forward_s, backward_s)
    optimizer_s = update.optimizer_s + m * update.sum_s
    if scenario.is_on_host:
        constants = scenario.engine.constants
        optimizer_s += num_layers * constants.layer_update_s
        if layout.dp * layout.cp > 1:
            times = count_reductions(scenario, layout, m) + (2 * m if layout.zero == 3 else 1)
            dp_s += num_layers * times * constants.layer_sync_s
    contention = scenario.cluster.contention
    return contention * dp_s, contention * optimizer_s


def hidden_share(scenario: Scenario) -> float:
    """Fraction of computation behind which data-parallel communication can hide; 0 where the same cores do both."""
    overlaps = scenario.engine.features.overlap_dp and not scenario.is_on_host
    return scenario.engine.constants.overlap if overlaps else 0.0


class Sent(NamedTuple):
    """Seconds of what a step sends for a rank's parameters, by the microbatch behind which it can hide."""

    each_s: float
    """Beside every microbatch but the last."""
    last_s: float
    """Beside the last one."""
    alone_s: float
    """Beside no microbatch: gradients are added and parameters updated, with what that sends."""

    @classmethod
    def of(cls, scenario: Scenario, layout: Layout, update: Update, m: int) -> "Sent":
        """The seconds of an update in a step of m microbatches."""
        reductions, all_s = (
            count_reductions(scenario, layout, m),
            update.recompute_s + update.reduce_s + update.gather_s,
        )
        each_s = update.recompute_s + update.reduce_s * (reductions > 1) + update.gather_s * (layout.zero == 3)
        alone_s = (reductions - 1) * update.add_s + update.optimizer_s + update.exchange_s + m * update.sum_s
        return cls(each_s, all_s + update.copy_s, alone_s)


def least_update_s(ways: Iterable[Sent], m: int, hidden_s: float) -> float:
    """A lower bound of `update_times` in any of some ways, where each of m microbatches hides at most so much."""
    return min(
        [
            alone_s
            + (m - 1) * (each_s - hidden_s if each_s > hidden_s else 0.0)
            + (last_s - hidden_s if last_s > hidden_s else 0.0)
            for each_s, last_s, alone_s in ways
        ],
        default=0.0,
    )


_Once = tuple[float, float, float, float]
"""All of an `Update` but the optimizer."""


def _once_s(
    scenario: Scenario, layout: Layout, n: float, head: float, frozen: float, spared: float, *, keeps_head: bool
) -> _Once:
    """Seconds for the n parameters that all ranks of a stage have.

    `head` of them are the head's, which may stay gathered for its backward, and `frozen` ones are not reduced, whose
    bytes are those of `spared` parameters fewer.
    """
    shards, e = count_state_shards(layout), activation_size(scenario)
    gathered = _weight_size(scenario) * (n - head) + e * head - _spared_bytes(scenario, layout, frozen, spared)
    again, copies = gathered - e * head * keeps_head, layout.dp * layout.cp // shards
    return _send_once(scenario, layout, n - frozen, gathered, again, shards, copies, layout.tp)


def _experts_once_s(scenario: Scenario, layout: Layout, n: float, frozen: float) -> _Once:
    """Seconds for a rank's n parameters of experts; each `ep`-th rank of a stage has the same ones."""
    shards = count_expert_shards(layout)
    gathered = _weight_size(scenario) * n - _spared_bytes(scenario, layout, frozen)
    copies = max(1, layout.expert_dp // shards)
    return _send_once(scenario, layout, n - frozen, gathered, gathered, shards, copies, layout.ep)


def _spared_bytes(scenario: Scenario, layout: Layout, frozen: float, spared: float = 0.0) -> float:
    """Bytes of frozen parameters that are not gathered: a distributed optimizer leaves them whole below ZeRO-3.

    Elsewhere it is what a quantized base spares, in parameters of the compute format.
    """
    return _weight_size(scenario) * (frozen if leaves_frozen_whole(scenario, layout) else spared)


def _gradient_size(scenario: Scenario) -> float:
    """Bytes of a gradient as it is reduced."""
    features = scenario.engine.features
    return BYTES[scenario.precision.reduce] if features.sharding == "fsdp2" else features.reduce_bytes


def _weight_size(scenario: Scenario) -> float:
    """Bytes of a block's weight while it is gathered; the embedding counts as one."""
    fmt, features = scenario.precision.matmul_format, scenario.engine.features
    if fmt is None or features.casts_itself or "weights" not in features.gathers_cast:
        return activation_size(scenario)  # less what `saved_by_casts` counts one by one
    return fmt.gathered_bytes


def _send_once(
    scenario: Scenario,
    layout: Layout,
    n: float,
    gather_bytes: float,
    again_bytes: float,
    shards: int,
    copies: int,
    stride: int,
) -> _Once:
    """Seconds among `shards` ranks, `stride` apart, that share the state of n trained parameters; it has `copies`."""
    features, reduce_bytes = scenario.engine.features, _gradient_size(scenario) * n
    shard_link = data_link(scenario, layout, stride, shards)
    reduce_s = half_all_reduce_s(reduce_bytes, shards, shard_link)
    copy_link = data_link(scenario, layout, stride * shards, copies)
    return (
        2 * reduce_s if features.reduction == "all-reduce" else reduce_s,
        2 * half_all_reduce_s(reduce_bytes / shards, copies, copy_link),
        half_all_reduce_s(gather_bytes, shards, shard_link),
        half_all_reduce_s(again_bytes, shards, shard_link) if layout.zero == 3 else 0.0,
    )


def _data_parallel_s(
    scenario: Scenario, layout: Layout, once: Update, m: int, forward_s: float, backward_s: float
) -> float:
    """A step's reductions and gathers, as far as computation does not hide them, and what hiding them costs.

    Kernels that send over the network take cores and bandwidth of memory from those that compute meanwhile. Within fast
    links no such cost was found.

    Gradients are reduced behind the backward that completes them, parameters gathered behind the forward (and,
    under ZeRO-3, behind the backward, where they share the link with the reduction) that uses them.
    """
    reductions, hidden = count_reductions(scenario, layout, m), hidden_share(scenario)
    is_on_network = layout.tp * count_state_shards(layout) > scenario.cluster.gpus_linked
    cost = scenario.engine.constants.overlap_slowdown if is_on_network else 0.0

    def exposed_s(sending_s: float, computing_s: float) -> float:
        hidden_s = min(sending_s, hidden * computing_s)
        return sending_s - hidden_s + cost * hidden_s

    exposed = (reductions - 1) * exposed_s(once.reduce_s + once.recompute_s, backward_s)
    exposed += (m - reductions) * exposed_s(once.recompute_s, backward_s)
    exposed += (reductions - 1) * once.add_s
    exposed += exposed_s(once.reduce_s + once.copy_s + once.recompute_s, backward_s)
    exposed += (m if layout.zero == 3 else 1) * exposed_s(once.gather_s, forward_s)
    return exposed + once.exchange_s
