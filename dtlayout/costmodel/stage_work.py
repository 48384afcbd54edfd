"""Stage work: seconds of one microbatch on one stage, with recomputation, embedding, head, host and messages.

[Note: the pace of the host]
The host of a GPU works ahead, so a microbatch takes max(GPU, host) seconds. This is split into forward and backward:

- The host needs longer in all: each direction takes the host's time.
- The GPU needs longer in all: each takes the GPU's time. But a direction in which the host needs longer takes the
  host's time, and the other one gets what is left.

So neither becomes shorter on a slower GPU. A plain ratio would move time from one to the other; since each hides other
messages of data parallelism, more could be hidden, and the slower GPU would have the shorter step. Gradients of
weights, which a schedule may put off, and the rest of backward share its time by the same rule.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, cached_property
from typing import NamedTuple

from dtlayout.costmodel.cache_keys import BlockLayout, StageClass, key_of
from dtlayout.costmodel.comm import message_s
from dtlayout.costmodel.compute import BlockTime, count_more_starts, host_s, weight_starts_share
from dtlayout.costmodel.forward_only import find_differentiated, find_forward_only, has_forward_only
from dtlayout.costmodel.offload import exposed_s, kept_copy_s
from dtlayout.costmodel.recomputation import recompute_time
from dtlayout.costmodel.scenario import Scenario, activation_size, tokens_of
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.recompute import Recompute

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
    """Waiting for the host, and for copies to its memory or from there."""
    forward_s: float
    """All of forward."""
    backward_s: float
    """All of backward."""
    weight_s: float = 0.0
    """The gradients of weights, a part of backward that a schedule may put off."""
    unpaired_s: float = 0.0
    """Exchanges of tokens that no other microbatch hides, once a step: in the first forward and the last backward."""

    @classmethod
    def add(cls, stages: Iterable["StageWork"]) -> "StageWork":
        """All of the work of a rank with these stages."""
        parts = list(zip(*stages, strict=True))
        assert parts, "a rank without stages has no work"
        return cls(*map(sum, parts))


class BlocksWork:
    """One microbatch on all but the head of any stage of a layout: what stages, and heads, share is computed once."""

    def __init__(self, scenario: Scenario, block_of: Mapping[ModelShape, TimeOf], layout: Layout, kernels: Kernels):
        """`block_of` times a block of each of `Scenario.kinds`, without recomputation."""
        self.scenario, self.model = scenario, scenario.model
        part, recompute = key_of(layout, BlockLayout), Recompute.parse(layout.recompute)
        blocks = [(of_kind, block_of[kind](part, kernels)) for kind, of_kind in scenario.kinds.items()]
        self.kinds = [(block, recompute_time(of_kind, layout, kernels, block)) for of_kind, block in blocks]
        """A block of each kind, and the seconds that computing it again takes and waits for tp."""
        times_s = [(block.gpu_s, sum(again)) for block, again in self.kinds]
        if has_forward_only(self.model):
            times_s += [(block.forward_only.gpu_s, 0.0) for block, _ in self.kinds]
        self.least_s = min([block_s for block_s, _ in times_s]), min([again_s for _, again_s in times_s])
        """Seconds that a microbatch takes at least in a block, and in computing it again."""
        self.block_host_s = host_s(scenario, layout, kernels)
        """Least time that the host needs for a block, forward and backward; `split_host_s` says how much for each."""
        self.block_host_weight_s = weight_starts_share(self.model) * self.block_host_s
        """Part of `block_host_s` for the gradients of weights."""
        self._routes_again = scenario.engine.features.routes_again(recompute)
        self._copies = [
            kept_copy_s(of_kind, layout, kernels) if layout.offloads_activations else (0.0, 0.0)
            for of_kind in scenario.kinds.values()
        ]
        self._sending_s = 0.0 if scenario.engine.features.overlap_pp else send_s(scenario, layout)
        constants, is_tp = scenario.engine.constants, layout.tp > 1
        if recompute.is_selective:
            self._host_again_s = constants.selective_host_tp_s if is_tp else constants.selective_host_s
        else:
            self._host_again_s = constants.full_host_tp_s if is_tp else constants.full_host_s
        self._host_again_s *= count_more_starts(self.model)
        self._sees_ends = scenario.is_on_host or self._sending_s > 0.0 or has_forward_only(self.model)

    @cached_property
    def on(self) -> Callable[[StageClass], StageWork]:
        """The work of a stage, as if it had no head; remembered, and most layouts are only bounded: of them none is."""
        return cache(self._find_work)

    def _find_work(self, stage: StageClass) -> StageWork:
        """Work of a stage; recomputed blocks are spread evenly over its blocks."""
        if (stage.embedding or stage.head) and not self._sees_ends:
            return self.on(stage._replace(embedding=False, head=False))
        blocks, recompute_s, again_tp_s, copying_s = BlockTime(0.0, 0.0, 0.0, 0.0), 0.0, 0.0, 0.0
        num_blocks, differentiated = max(1, stage.num_layers), find_differentiated(self.model, stage.example)
        counts = [count for _, count in self.model.kinds(differentiated)]
        found = zip(counts, self.kinds, self._copies, strict=False)
        for count, (block, (kind_again_s, kind_again_tp_s)), (whole_s, kept_s) in found:
            covered = stage.num_recomputed * count / num_blocks
            recompute_s, again_tp_s = recompute_s + covered * kind_again_s, again_tp_s + covered * kind_again_tp_s
            copying_s += (count - covered) * whole_s + covered * kept_s
            blocks = BlockTime(*[total + count * each for total, each in zip(blocks, block, strict=True)])
        weight_s = blocks.weight_s
        forward_only = self.model.kinds(find_forward_only(self.model, stage.example))
        for (_, count), (block, _) in zip(forward_only, self.kinds, strict=False):
            if count:
                parts = zip(blocks, block.forward_only, strict=True)
                blocks = BlockTime(*[total + count * each for total, each in parts])
        forward_s, backward_s = blocks.forward_s, blocks.backward_s
        forward_tp_s, backward_tp_s = blocks.forward_tp_s, blocks.backward_tp_s + again_tp_s
        host_forward_s, host_backward_s = self._host_s(stage, len(differentiated))
        wait_forward_s, wait_backward_s = host_forward_s, host_backward_s
        if not self.scenario.is_on_host:  # the host works ahead, and is waited for where it needs longer
            gpu_s = forward_s + forward_tp_s, backward_s + backward_tp_s + recompute_s
            wait_forward_s, wait_backward_s = wait_for_host(gpu_s, (host_forward_s, host_backward_s))
            host_weight_s = len(differentiated) * self.block_host_weight_s
            host_rest_s = host_backward_s - host_weight_s
            weight_s = min(max(weight_s, host_weight_s), gpu_s[1] + wait_backward_s - host_rest_s)
        routing_s, again = blocks.routing_wait_s / 3, self._routes_again * stage.num_recomputed / num_blocks
        wait_forward_s, wait_backward_s = wait_forward_s + routing_s, wait_backward_s + (2 + again) * routing_s
        if copying_s:
            wait_forward_s += exposed_s(self.scenario, copying_s, forward_s + forward_tp_s + wait_forward_s)
            whole_backward_s = backward_s + backward_tp_s + recompute_s + wait_backward_s
            wait_backward_s += exposed_s(self.scenario, copying_s, whole_backward_s)
        send_forward_s = 0.0 if stage.head else self._sending_s
        send_backward_s = 0.0 if stage.embedding else self._sending_s
        return StageWork(
            compute_s=forward_s + backward_s,
            recompute_s=recompute_s,
            tp_s=forward_tp_s + backward_tp_s,
            pp_s=send_forward_s + send_backward_s,
            host_s=wait_forward_s + wait_backward_s,
            forward_s=forward_s + forward_tp_s + wait_forward_s + send_forward_s,
            backward_s=backward_s + backward_tp_s + recompute_s + wait_backward_s + send_backward_s,
            weight_s=weight_s,
            unpaired_s=blocks.hidden_ep_s,
        )

    def _host_s(self, stage: StageClass, num_differentiated: int) -> tuple[float, float]:
        """The host's time for forward and for backward of one microbatch on a stage.

        Of its blocks `num_differentiated` have a backward, which is longer where they are recomputed. On a GPU only
        blocks count: the head's kernels are so long that the host keeps ahead.
        """
        both_s, messages_s = stage.num_layers * self.block_host_s, 0.0
        if self.scenario.is_on_host:
            constants = self.scenario.engine.constants
            both_s += (stage.head + stage.embedding) / 2 * constants.head_host_s
            messages_s = ((not stage.head) + (not stage.embedding)) * constants.message_host_s  # one sent, one received
        num_forward_only = stage.num_layers - num_differentiated
        num_recomputed = stage.num_recomputed * num_differentiated / max(1, stage.num_layers)
        forward_s, backward_s = split_host_s(both_s)
        backward_s -= num_forward_only * split_host_s(self.block_host_s)[1]
        return forward_s + messages_s, backward_s + messages_s + num_recomputed * self._host_again_s


class LayoutWork:
    """One microbatch on any stage of a layout with some kernels."""

    def __init__(self, blocks: BlocksWork, head: BlockTime):
        """`head` is the time of the head and the loss."""
        self.blocks, self.head = blocks, head
        self.least_s = *blocks.least_s, head.gpu_s
        """Seconds that a microbatch takes at least in a block, in computing it again, and in the head."""

    def on(self, stage: StageClass) -> StageWork:
        """The work of a stage."""
        return self._with_head(stage) if stage.head else self.blocks.on(stage)

    @cached_property
    def _with_head(self) -> Callable[[StageClass], StageWork]:
        return cache(self._add_head)

    def _add_head(self, stage: StageClass) -> StageWork:
        work, head = self.blocks.on(stage), self.head
        return work._replace(
            compute_s=work.compute_s + head.forward_s + head.backward_s,
            tp_s=work.tp_s + head.forward_tp_s + head.backward_tp_s,
            forward_s=work.forward_s + head.forward_s + head.forward_tp_s,
            backward_s=work.backward_s + head.backward_s + head.backward_tp_s,
        )


def split_host_s(both_s: float) -> tuple[float, float]:
    """Forward's and backward's part of the host's time for both; backward starts twice as many kernels."""
    return both_s / 3, both_s * 2 / 3


def wait_for_host(gpu_s: tuple[float, float], host_s: tuple[float, float]) -> tuple[float, float]:
    """Seconds by which (forward, backward) of a microbatch are longer than on the GPU alone, where a host works ahead.

    Their sum is max(0, host − GPU). One of them is negative where the other direction takes a part of its time. Neither
    direction becomes shorter on a slower GPU: [Note: the pace of the host].

    >>> wait_for_host((1, 2), (2, 4)), wait_for_host((2, 4), (1, 2)), wait_for_host((1, 4), (1.5, 3))
    ((1, 2), (0, 0), (0.5, -0.5))
    """
    forward_s, backward_s = host_s[0] - gpu_s[0], host_s[1] - gpu_s[1]
    if forward_s + backward_s >= 0:
        return forward_s, backward_s
    moved_s = max(0, forward_s) - max(0, backward_s)
    return moved_s, -moved_s


def send_s(scenario: Scenario, layout: Layout) -> float:
    """One microbatch's hidden states on their way to the next stage, or their gradient on its way back."""
    split = layout.tp if layout.shards_sequence or scenario.engine.features.scatters_messages else 1
    size = tokens_of(scenario, layout) * scenario.model.hidden_size * activation_size(scenario)
    return message_s(scenario, layout, size / split)
