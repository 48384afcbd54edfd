"""Messages: what a rank sends in a step along each axis, over which links, and how much of that time is waited for.

[Note: bytes are seconds of a slow link]
No formula stands here. The functions that time tp, cp, ep, pp and dp are asked three times, each time about other
machines. Where nothing is hidden they say how long a rank sends. Where links carry one byte a second and start at once,
the seconds that they say are bytes: once those of fast links, and once those of the network. A formula that begins to
send more is so counted here too.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

from dtlayout.costmodel.attention import attention_s
from dtlayout.costmodel.cache_keys import BlockLayout, PipelineLayout, key_of
from dtlayout.costmodel.compute import BlockTime, block_ep_s, block_time, block_tp_s
from dtlayout.costmodel.context import block_cp_s
from dtlayout.costmodel.engine_constants import Constants
from dtlayout.costmodel.estimate import Estimator, TimeEstimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.costmodel.stage_work import BlocksWork, StageWork, send_s
from dtlayout.costmodel.update import Sent
from dtlayout.schedules.actions import Result
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

IN_BLOCKS = ("tp", "cp", "ep")
"""Axes whose messages a block sends; the `tp` of a TimeEstimate is the time in which they are waited for."""
MESSAGE_AXES = (*IN_BLOCKS, "pp", "dp")
"""Axes in the order in which they are told; `dp` are gradients and parameters of all ranks that share them."""

_RINGS = ("tp", "cp", "dp")
"""Axes whose collectives take one kind of link: those that cross nodes are no faster than fast links."""
_NO_TIME = BlockTime(0.0, 0.0, 0.0, 0.0)


class AxisMessages(NamedTuple):
    """Everything that a rank sends along one axis in a step."""

    axis: str
    """One of MESSAGE_AXES."""
    fast_link_bytes: float
    """Bytes that leave the rank and stay among the GPUs that fast links join."""
    network_bytes: float
    """Bytes that leave the rank in collectives and messages that cross nodes, every hop of their ring counted."""
    sending_s: float
    """Seconds that sending takes, hidden or not."""
    waited_s: float
    """Seconds by which the rank's step is longer."""

    @property
    def hidden_share(self) -> float:
        """Fraction of `sending_s` that computation hides, 0 to 1."""
        return min(1.0, max(0.0, 1 - self.waited_s / self.sending_s)) if self.sending_s else 0.0


def list_messages(
    estimator: Estimator, layout: Layout, kernels: Kernels, times: Mapping[int, TimeEstimate]
) -> dict[int, list[AxisMessages]]:
    """Each pipeline rank of `times`, which has their steps → its messages of each axis that sends any."""
    scenario, stayed = estimator.scenario, replace(layout, offload="none")  # copies to the host are no messages
    sending = _sum_up(_hide_nothing(scenario), stayed, kernels)
    near_bytes = _sum_up(_weigh_bytes(scenario, layout.tp, links=1.0, network=inf), stayed, kernels)
    far_bytes = _sum_up(_weigh_bytes(scenario, layout.tp, links=inf, network=1.0), stayed, kernels)
    in_blocks = _add_axes(estimator, layout, kernels, _wait_alone)
    waiting_pp_s = _wait_for_messages(estimator, layout, kernels)
    found = {}
    for rank, time in times.items():
        # Where ranks share cores, all of them wait longer.
        of_blocks = {axis: in_blocks[axis][rank] for axis in IN_BLOCKS}
        longer = time.tp / total if (total := sum(of_blocks.values())) else 1.0
        waited = {axis: longer * each_s for axis, each_s in of_blocks.items()}
        waited |= {"pp": time.pp + waiting_pp_s[rank], "dp": time.dp}
        rows = []
        for axis in MESSAGE_AXES:
            far = far_bytes[axis][rank]
            near = near_bytes[axis][rank] - (far if axis in _RINGS else 0.0)
            if near > 0 or far > 0:
                rows.append(AxisMessages(axis, near, far, sending[axis][rank], waited[axis]))
        found[rank] = rows
    return found


def _hide_nothing(scenario: Scenario) -> Scenario:
    """A scenario in which nothing is hidden, and passes over memory take no time: what is left is sending."""
    return _change(scenario, replace(scenario.engine.constants, tp_exposed=1.0, overlap=0.0), memory_bytes_per_s=inf)


def _weigh_bytes(scenario: Scenario, tp: int, *, links: float, network: float) -> Scenario:
    """A scenario in which a rank sends so many bytes a second over fast links and over the network, without a start."""
    in_one_node = min(tp, scenario.cluster.gpus_linked)
    constants = replace(
        scenario.engine.constants, tp_exposed=1.0, overlap=0.0, link_efficiency=1.0, collective_start_s=0.0,
        link_latency_s=0.0, tp_network_latency_s=0.0, network_efficiency=1.0, network_sharing=0.0,
        network_congestion=0.0, message_efficiency=1.0, exchange_efficiency=1.0, tp_network_efficiency=1 / in_one_node,
    )  # fmt: skip
    return _change(
        scenario, constants, memory_bytes_per_s=inf, network_latency_s=0.0, link_bytes_per_s=links,
        network_bytes_per_s=network,
    )  # fmt: skip


def _change(scenario: Scenario, constants: Constants, **gpu: Any) -> Scenario:
    engine, cluster = replace(scenario.engine, constants=constants), scenario.cluster
    return replace(scenario, engine=engine, cluster=replace(cluster, gpu=replace(cluster.gpu, **gpu)))


def _sum_up(scenario: Scenario, layout: Layout, kernels: Kernels) -> dict[str, list[float]]:
    """Axis → seconds that each pipeline rank sends in a step of a scenario that hides nothing."""
    estimator = Estimator(scenario)
    m = max(1, layout.num_microbatches(scenario.batch))
    found = _add_axes(estimator, layout, kernels, _send_alone)
    found["pp"] = [send_s(scenario, layout) * m * _count_receivers(layout, rank) for rank in range(layout.pp)]
    found["dp"] = []
    for rank in range(layout.pp):
        update = estimator.update(rank, layout)
        each_s, last_s, _ = Sent.of(scenario, layout, update, m)
        found["dp"].append((m - 1) * each_s + last_s + update.exchange_s)
    return found


def _count_receivers(layout: Layout, rank: int) -> int:
    """Messages that a pipeline rank sends for a microbatch: hidden states forward, gradients back."""
    results = (
        Result(is_gradient=up, stage=stage, microbatch=0)
        for stage in layout.placement.stages_of(rank)
        for up in (False, True)
    )
    return sum(layout.placement.receiver_of(result) is not None for result in results)


_Sends = Callable[[Scenario, Any, Kernels], BlockTime]
"""Function of a scenario, a BlockLayout and kernels: a block in which nothing but one axis' messages takes time."""
_SendsAlong = Callable[[str, Scenario, Any, Kernels], BlockTime]
"""Function of an axis, and of what `_Sends` takes."""


def _send_alone(axis: str, scenario: Scenario, layout: Any, kernels: Kernels) -> BlockTime:
    """A block that sends along one axis, in which nothing hides what it sends."""
    if axis == "tp":
        return _block_of(axis, block_tp_s(scenario, layout._replace(overlaps_tp=False)))
    if axis == "cp":
        return _block_of(axis, block_cp_s(scenario, layout, 0.0, 0.0))
    return _block_of(axis, (exchange_s := block_ep_s(scenario, layout), exchange_s))


def _wait_alone(axis: str, scenario: Scenario, layout: Any, kernels: Kernels) -> BlockTime:
    """A block that waits for one axis' messages, as long as nothing hides them."""
    of_tp, of_cp = block_tp_s(scenario, layout), block_cp_s(scenario, layout, *attention_s(scenario, layout, kernels))
    if axis != "ep":
        return _block_of(axis, of_tp if axis == "tp" else of_cp)
    block = block_time(scenario, layout, kernels)
    of_ep = block.forward_ep_s, max(0.0, block.backward_tp_s - of_tp[1] - of_cp[1])
    return _block_of(axis, of_ep)._replace(hidden_ep_s=block.hidden_ep_s)


def _block_of(axis: str, times: tuple[float, float]) -> BlockTime:
    forward_s, backward_s = times
    own = {f"forward_{axis}_s": forward_s} if axis != "tp" else {}
    return _NO_TIME._replace(forward_tp_s=forward_s, backward_tp_s=backward_s, **own)


def _add_axes(estimator: Estimator, layout: Layout, kernels: Kernels, sends: _SendsAlong) -> dict[str, list[float]]:
    """Axis → seconds that each pipeline rank sends or waits in blocks and head, where ranks share no cores."""
    found = {axis: _add_blocks(estimator, layout, kernels, partial(sends, axis)) for axis in IN_BLOCKS}
    found["tp"] = [a + b for a, b in zip(found["tp"], _add_heads(estimator, layout, kernels), strict=True)]
    return found


def _add_blocks(estimator: Estimator, layout: Layout, kernels: Kernels, sends: _Sends) -> list[float]:
    """Seconds in which the blocks of each pipeline rank send, of all microbatches, recomputation too."""
    scenario = estimator.scenario
    of_kinds = {kind: partial(sends, of_kind) for kind, of_kind in scenario.kinds.items()}
    blocks = BlocksWork(scenario, of_kinds, layout, kernels)
    m = max(1, layout.num_microbatches(scenario.batch))
    works = [blocks.on(stage) for stage in estimator.groups(PipelineLayout.of(layout)).classes]
    ranks = (StageWork.add(layout.placement.take(works, rank)) for rank in range(layout.pp))
    return [m * own.tp_s + own.unpaired_s for own in ranks]


def _add_heads(estimator: Estimator, layout: Layout, kernels: Kernels) -> list[float]:
    """Seconds in which the head of each pipeline rank sends, 0 for one without it."""
    m = max(1, layout.num_microbatches(estimator.scenario.batch))
    head = estimator.head(key_of(layout, BlockLayout), kernels)
    classes = estimator.groups(PipelineLayout.of(layout)).classes
    heads = [stage.head * m * (head.forward_tp_s + head.backward_tp_s) for stage in classes]
    return [sum(layout.placement.take(heads, rank)) for rank in range(layout.pp)]


def _wait_for_messages(estimator: Estimator, layout: Layout, kernels: Kernels) -> list[float]:
    """Seconds by which each pipeline rank ends later because it waits for messages that do not block their sender."""
    if not (delay_s := estimator.delay_s(layout)):
        return [0.0] * layout.pp
    m, work = max(1, layout.num_microbatches(estimator.scenario.batch)), estimator.work(layout, kernels)
    ends = [estimator.play(layout, m, work, each_s).finished_s for each_s in (delay_s, 0.0)]
    return [max(0.0, later - sooner) for later, sooner in zip(*ends, strict=True)]
