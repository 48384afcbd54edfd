"""Cross-entropy on logits that are split over the vocabulary: two small all-reduces, and no rank sees all logits.

Megatron's scheme (arXiv:1909.08053, sec. 3), as one autograd function. Legend: T tokens, V local vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from dtlayout.ops.loss import IGNORED


class VocabParallelLoss(ParallelStyle):
    """Makes a `CrossEntropy` take this rank's columns of the logits, plain tensors [B, S, V]."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def forward(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
            return _VocabParallelCrossEntropy.apply(logits_BSV.flatten(0, 1), targets_BS.flatten(), group)

        module.forward = forward
        return module


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Sum over valid tokens of log Σ exp(logit) - logit[target], the same on every rank of the group."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, group: dist.ProcessGroup) -> Tensor:
        exact = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32), copy=True)
        columns = exact.shape[1]
        largest_T = exact.amax(dim=1)
        dist.all_reduce(largest_T, dist.ReduceOp.MAX, group=group)
        exact -= largest_T[:, None]

        local_T = targets_T - columns * group.rank()
        is_local_T = (local_T >= 0) & (local_T < columns)
        local_T = local_T.masked_fill(~is_local_T, 0)
        wanted_T = exact.gather(1, local_T[:, None]).squeeze(1).masked_fill(~is_local_T, 0)
        exact.exp_()
        sums = torch.stack((exact.sum(dim=1), wanted_T))
        dist.all_reduce(sums, group=group)

        is_valid_T = targets_T != IGNORED
        exact /= sums[0][:, None]  # the softmax, which is what backward needs
        ctx.save_for_backward(exact, local_T, is_local_T, is_valid_T)
        ctx.logits_dtype = logits_TV.dtype
        return ((sums[0].log() - sums[1]) * is_valid_T).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        softmax_TV, local_T, is_local_T, is_valid_T = ctx.saved_tensors
        gradient_TV = softmax_TV.scatter_add(1, local_T[:, None], -is_local_T[:, None].to(softmax_TV.dtype))
        gradient_TV *= (is_valid_T * gradients[0])[:, None]
        return gradient_TV.to(ctx.logits_dtype), None, None
