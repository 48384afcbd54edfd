"""Stage work: seconds of one microbatch on one stage, with recomputation, embedding, head, host and messages."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from dtlayout.costmodel.comm import message_s
from dtlayout.costmodel.compute import BlockTime, recompute_time
from dtlayout.costmodel.parts import BlockLayout, StageClass, part_of
from dtlayout.costmodel.scenario import Scenario, activation_size, tokens_of
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.model_shape import ModelShape
from dtlayout.recompute import Recompute

TimeOf = Callable[[BlockLayout, Kernels], BlockTime]


class StageWork(NamedTuple):
    """Seconds of one microbatch on one stage, by what they are spent on and by direction."""

    compute_s: float
    """Forward and backward, each FLOP once."""
    recompute_s: float
    """Forward again."""
    tp_s: float
    """Waiting for tp."""
    pp_s: float
    """Waiting for a message to have gone, where that blocks."""
    host_s: float
    """Waiting for the host."""
    forward_s: float
    """All of forward."""
    backward_s: float
    """All of backward."""
    weight_s: float = 0.0
    """The gradients of weights, a part of backward that a schedule may put off."""

    @classmethod
    def add(cls, stages: Iterable["StageWork"]) -> "StageWork":
        """All of the work of a rank with these stages."""
        return cls(*map(sum, zip(*stages, strict=True)))


def stage_work(
    scenario: Scenario,
    block_of: Mapping[ModelShape, TimeOf],
    head_of: TimeOf,
    stage: StageClass,
    layout: Layout,
    kernels: Kernels,
) -> StageWork:
    """The work of a stage; `block_of` times a block of each of `Scenario.kinds`, `head_of` the head.

    Neither with recomputation. Where blocks differ and only some are recomputed, these are of all kinds alike.
    """
    part = part_of(layout, BlockLayout)
    blocks, again_s, again_tp_s = BlockTime(0.0, 0.0, 0.0, 0.0), 0.0, 0.0
    for kind, count in scenario.model.kinds(stage.example.layers):
        block = block_of[kind](part, kernels)
        covered = stage.num_recomputed * count / max(1, stage.num_layers)
        kind_again_s, kind_again_tp_s = recompute_time(scenario.kinds[kind], layout, kernels, block)
        again_s, again_tp_s = again_s + covered * kind_again_s, again_tp_s + covered * kind_again_tp_s
        blocks = BlockTime(*(total + count * each for total, each in zip(blocks, block, strict=True)))
    forward_s, backward_s = blocks.forward_s, blocks.backward_s
    forward_tp_s, backward_tp_s = blocks.forward_tp_s, blocks.backward_tp_s + again_tp_s
    host_forward_s, host_backward_s = _host_s(scenario, stage, layout, blocks.host_s)
    if not scenario.is_on_host:  # the host works ahead, and is waited for where it needs longer
        gpu_s = forward_s + backward_s + forward_tp_s + backward_tp_s + again_s
        waited = max(0.0, 1 - gpu_s / max(gpu_s, host_forward_s + host_backward_s, 1e-30))
        host_forward_s, host_backward_s = waited * host_forward_s, waited * host_backward_s
    is_whole = not Recompute.parse(layout.recompute).is_selective  # which routes again
    waited_s, again = blocks.routing_wait_s / 3, is_whole * stage.num_recomputed / max(1, stage.num_layers)
    host_forward_s, host_backward_s = host_forward_s + waited_s, host_backward_s + (2 + again) * waited_s
    if stage.head:
        head = head_of(part, kernels)
        forward_s, backward_s = forward_s + head.forward_s, backward_s + head.backward_s
        forward_tp_s, backward_tp_s = forward_tp_s + head.forward_tp_s, backward_tp_s + head.backward_tp_s
    sending_s = send_s(scenario, layout) if scenario.engine.features.blocking_messages else 0.0
    send_forward_s = 0.0 if stage.head else sending_s
    send_backward_s = 0.0 if stage.embedding else sending_s
    return StageWork(
        compute_s=forward_s + backward_s,
        recompute_s=again_s,
        tp_s=forward_tp_s + backward_tp_s,
        pp_s=send_forward_s + send_backward_s,
        host_s=host_forward_s + host_backward_s,
        forward_s=forward_s + forward_tp_s + host_forward_s + send_forward_s,
        backward_s=backward_s + backward_tp_s + again_s + host_backward_s + send_backward_s,
        weight_s=blocks.forward_s - blocks.attention_s - blocks.elementwise_s,
    )


def send_s(scenario: Scenario, layout: Layout) -> float:
    """One microbatch's hidden states on their way to the next stage, or their gradient on its way back."""
    split = layout.tp if layout.shards_sequence or scenario.engine.features.scatters_messages else 1
    size = tokens_of(scenario, layout) * scenario.model.hidden_size * activation_size(scenario)
    return message_s(scenario, layout, size / split)


def _host_s(scenario: Scenario, stage: StageClass, layout: Layout, blocks_s: float) -> tuple[float, float]:
    """The host's time for one microbatch on a stage, forward and backward, of which blocks take `blocks_s`.

    Backward has twice the operations of forward, beside those that it does again. On a GPU only blocks count: the
    head's long kernels leave the host time enough.
    """
    constants, is_tp = scenario.engine.constants, layout.tp > 1
    both_s, messages_s = blocks_s, 0.0
    if scenario.is_on_host:
        both_s += (stage.head + stage.embedding) / 2 * constants.head_host_s
        messages_s = ((not stage.head) + (not stage.embedding)) * constants.message_host_s  # one sent, one received
    if Recompute.parse(layout.recompute).is_selective:
        again_s = constants.selective_host_tp_s if is_tp else constants.selective_host_s
    else:
        again_s = constants.full_host_tp_s if is_tp else constants.full_host_s
    return both_s / 3 + messages_s, both_s * 2 / 3 + messages_s + stage.num_recomputed * again_s
