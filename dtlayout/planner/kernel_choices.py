"""Kernel choices: the kernels that are legal beside a layout, and those of them that no others dominate.

Kernels *dominate* others in the same layout if they are no slower in forward, in backward and in recomputation, hold no
more bytes, and never make the GPU wait for the host. Whatever the pipeline, dominated kernels make no layout faster or
smaller, so the search leaves them out.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from operator import le
from typing import NamedTuple, TypeVar

from dtlayout.costmodel.cache_keys import BlockLayout, StageLayout, key_of
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.scenario import find_kernel_refusals, find_unsupported, request_kernels
from dtlayout.costmodel.stage_work import split_host_s
from dtlayout.planner.peaks import Peaks
from dtlayout.planner.space import Space
from dtlayout.spec.kernel_records import KernelRequest
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

T = TypeVar("T")


class KernelCost(NamedTuple):
    """Time and memory of a block, or of the head, with some kernels; dominance compares two of these."""

    spent: tuple[float, ...]
    """Seconds and bytes, in an order that both sides share."""
    waits_s: float = 0.0
    """Seconds that the host needs longer than the GPU, summed over a block's forward, its weights' gradients and the
    rest of its backward. A kernel with any cannot dominate: a wait in one part shortens or lengthens the others."""


class KernelChoices:
    """Finds kernels for the layouts of one space; each answer is computed once."""

    def __init__(self, space: Space, estimator: Estimator, peaks: Peaks):
        """`estimator` says the seconds of a block, `peaks` its bytes."""
        self.space, self.estimator, self.peaks = space, estimator, peaks
        self.legal = cache(self._find_legal)
        """Legal kernels, from tp, cp, cp_method, whether the backward is split, and recomputation."""
        self.undominated = cache(self._find_undominated)
        """Pairs of a StageLayout and kernels that no other pair dominates, from several StageLayouts that differ in
        tp_overlap alone, and whether the backward is split."""
        self._able = cache(self._find_able)
        self._costs = cache(self._find_cost)

    def legal_for(self, layout: Layout, recompute: str) -> list[Kernels]:
        """Legal kernels of a layout with some recomputation in place of its own."""
        return self.legal(layout.tp, layout.cp, layout.cp_method, layout.splits_backward, recompute)

    def _find_legal(self, tp: int, cp: int, method: str, splits: bool, recompute: str) -> list[Kernels]:
        sp = self.space.scenario.engine.features.has_sequence_parallel  # no kernel depends on it
        layout = Layout(
            tp=tp, cp=cp, cp_method=method, sequence_parallel=sp, recompute=recompute, offload=self.space.offload
        )
        layout = self.space.without_granted(layout)
        if find_unsupported(self.space.scenario, layout):
            return []
        return self._able(replace(request_kernels(self.space.scenario, layout), splits_backward=splits))

    def _find_able(self, request: KernelRequest) -> list[Kernels]:
        scenario = self.space.scenario
        return [each for each in self.space.kernels if not find_kernel_refusals(scenario, each, request)]

    def _find_undominated(
        self, parts: tuple[StageLayout, ...], splits: bool = False
    ) -> list[tuple[StageLayout, Kernels]]:
        """`undominated`, with the loss compared apart from all other kernels.

        The loss belongs to the head, and the other kernels to the blocks. So other kernels that are dominated with one
        loss are dominated with each, and a loss that is dominated in one part is dominated in each.
        """
        first = parts[0]
        kernels = self.legal(first.tp, first.cp, first.cp_method, splits, first.recompute)
        if len(kernels) * len(parts) < 2:
            return [(part, each) for part in parts for each in kernels]
        left = _leave_undominated({(p, each): self._costs(p, each) for p in parts for each in with_one_loss(kernels)})
        of_loss = {each.loss: each for each in kernels}
        losses = list(of_loss)
        if len(losses) > 1:
            losses = _leave_undominated({loss: self._find_head_cost(first, each) for loss, each in of_loss.items()})
        return [(part, replace(each, loss=loss)) for part, each in left for loss in losses]

    def _find_cost(self, part: StageLayout, kernels: Kernels) -> KernelCost:
        """Cost of a block, and bytes of the head, which are equal for all kernels with one loss."""
        blocks = self.estimator.layout_work(part, kernels).blocks
        block, recompute_s = blocks.kinds[0]
        forward_s, backward_s = block.forward_s + block.forward_tp_s, block.backward_s + block.backward_tp_s
        host_forward_s, host_backward_s = split_host_s(blocks.block_host_s)
        host_weight_s = blocks.block_host_weight_s
        pairs = (  # the host's seconds and the GPU's
            (host_forward_s, block.forward_s),
            (host_weight_s, block.weight_s),
            (host_backward_s - host_weight_s, block.backward_s - block.weight_s),
        )
        waits_s = sum(max(0.0, of_host - of_gpu) for of_host, of_gpu in pairs)
        return KernelCost((forward_s, backward_s, sum(recompute_s), *self.peaks.block_bytes(part, kernels)), waits_s)

    def _find_head_cost(self, part: StageLayout, kernels: Kernels) -> KernelCost:
        head = self.estimator.head(key_of(part, BlockLayout), kernels)
        return KernelCost((head.forward_s + head.backward_s, self.peaks.block_bytes(part, kernels).logits))


def with_one_loss(kernels: list[Kernels]) -> list[Kernels]:
    """Kernels with the loss of the first: a loss belongs to the head, and changes nothing in a block."""
    return [each for each in kernels if each.loss == kernels[0].loss]


def _leave_undominated(costs: Mapping[T, KernelCost]) -> list[T]:
    """Keys whose cost no other one dominates; of equal costs the first."""
    return [
        each
        for i, (each, own) in enumerate(costs.items())
        if not any(
            other.waits_s == 0.0 and all(map(le, other.spent, own.spent)) and (j < i or other != own)
            for j, other in enumerate(costs.values()) if j != i
        )
    ]  # fmt: skip
