"""RMSNorm (arXiv:1910.07467): x / sqrt(mean(x²) + eps) · weight, over the last dimension."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtlayout.base.errors import KernelError
from dtlayout.spec.kernel_records import NormKernel
from dtlayout.spec.kernel_table import find_kernel


class RMSNorm(nn.Module):
    """RMSNorm over [..., size]; statistics in fp32 or finer whatever the dtype of x."""

    def __init__(self, size: int, eps: float, kernel: str, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.function = find_kernel(NormKernel, kernel).load()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.eps)


def eager_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, one operation after the other, as in HF's Llama: each writes its result to memory."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (exact * scale).to(x.dtype)


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """PyTorch's single operation for RMSNorm."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def liger_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """liger-kernel's RMSNorm; statistics in fp32."""
    if type(x) is not Tensor:  # Triton reads memory, and a wrapper has none of its own
        raise KernelError(
            "kernels.norm=liger runs on this rank's tensors, and a plan hands it sharded ones; give its module the "
            "style sequence, or use kernels.norm=fused"
        )
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)
