"""Update: the end of a step, when gradients are reduced, parameters gathered and updated."""

from dtlayout.costmodel.comm import data_link, half_all_reduce_s
from dtlayout.costmodel.compute import pass_s
from dtlayout.costmodel.memory import count_head_parameters
from dtlayout.costmodel.scenario import Scenario, activation_size, count_state_shards
from dtlayout.layout import Layout
from dtlayout.models.counting import count_block_parameters
from dtlayout.precision import BYTES

_GRADIENT_TRAFFIC_BYTES = 12
"""Read and written for each parameter of the stage: gradients cast and their norm, weights cast back."""


def update_times(
    scenario: Scenario,
    layout: Layout,
    n: float,
    num_layers: int,
    m: int,
    forward_s: float,
    backward_s: float,
    *,
    has_head: bool,
) -> tuple[float, float]:
    """Seconds of exposed data-parallel communication and of the optimizer, on a rank of n parameters.

    The parameters are of `num_layers` blocks and, where it has the head, of that and others; m microbatches of so many
    seconds hide what can be hidden.
    """
    traffic = n * (_GRADIENT_TRAFFIC_BYTES + scenario.optimizer.update_bytes / count_state_shards(layout))
    keeps_head = has_head and scenario.engine.features.sharding == "fsdp2"
    gathered = activation_size(scenario) * n
    if fmt := scenario.precision.matmul_format:
        in_blocks = num_layers * count_block_parameters(scenario.model) / layout.tp
        gathered += (fmt.gathered_bytes - activation_size(scenario)) * in_blocks
    head = count_head_parameters(scenario.model, layout.tp) if keeps_head else 0.0
    again = gathered - activation_size(scenario) * head
    dp_s = _data_parallel_s(scenario, layout, n, gathered, again, m, forward_s, backward_s)
    optimizer_s = pass_s(scenario, traffic)
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
    overlaps = scenario.engine.features.overlaps_reduction and not scenario.is_on_host
    return scenario.engine.constants.overlap if overlaps else 0.0


def count_reductions(scenario: Scenario, layout: Layout, m: int) -> int:
    """How often gradients are summed over data-parallel ranks in a step of m microbatches."""
    is_each = layout.zero > 1 and (scenario.engine.features.sharding == "fsdp2" or layout.pp == 1)
    return m if is_each else 1


def _data_parallel_s(
    scenario: Scenario,
    layout: Layout,
    n: float,
    gather_bytes: float,
    again_bytes: float,
    m: int,
    forward_s: float,
    backward_s: float,
) -> float:
    """A step's reductions and gathers of n parameters, as far as computation does not hide them.

    Gradients are reduced behind the backward that completes them, parameters gathered behind the forward (and,
    under ZeRO-3, `again_bytes` behind the backward) that uses them.
    """
    if layout.dp * layout.cp == 1:
        return 0.0
    features, hidden = scenario.engine.features, hidden_share(scenario)
    reduce_bytes = features.reduce_bytes * n
    if features.sharding == "fsdp2":
        reduce_bytes = BYTES[scenario.precision.reduce] * n
    shards = count_state_shards(layout)
    copies = layout.dp * layout.cp // shards
    shard_link = data_link(scenario, layout, layout.tp, shards)
    reduce_s = half_all_reduce_s(reduce_bytes, shards, shard_link)
    gather_s = half_all_reduce_s(gather_bytes, shards, shard_link)
    if features.reduction == "all-reduce":
        reduce_s = 2 * reduce_s
    copy_link = data_link(scenario, layout, layout.tp * shards, copies)
    copy_s = 2 * half_all_reduce_s(reduce_bytes / shards, copies, copy_link)
    reductions = count_reductions(scenario, layout, m)
    # Behind the same backward as the reduction, on the same link.
    again_s = half_all_reduce_s(again_bytes, shards, shard_link) if layout.zero == 3 else 0.0

    def exposed_s(sending_s: float, computing_s: float) -> float:
        return max(0.0, sending_s - hidden * computing_s)

    exposed = (reductions - 1) * exposed_s(reduce_s + again_s, backward_s)
    exposed += (m - reductions) * exposed_s(again_s, backward_s)
    exposed += exposed_s(reduce_s + copy_s + again_s, backward_s)
    exposed += (m if layout.zero == 3 else 1) * exposed_s(gather_s, forward_s)
    return exposed
