"""Kernels: which implementation runs each operation that has several."""

from dataclasses import dataclass
from typing import Literal, get_args

from dtlayout.errors import InvalidConfig
from dtlayout.precision import Precision

Attention = Literal["sdpa-flash", "sdpa-math", "flash1", "megatron-softmax", "torch"]
PREDICTED_ONLY = ("flash1", "megatron-softmax", "torch")
"""Kernels of other engines, which the cost model knows and the trainer does not have."""
Norm = Literal["eager", "fused"]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """A choice for each operation; what it means stands in `dtlayout.ops`."""

    attention: Attention = "sdpa-flash"
    """Backend of scaled_dot_product_attention; sdpa-flash is PyTorch's FlashAttention-2 on CUDA, its own on CPU.
    flash1, megatron-softmax and torch can be predicted, not run."""
    norm: Norm = "fused"
    """RMSNorm as separate operations (eager) or as PyTorch's one operation (fused)."""

    def __post_init__(self) -> None:
        for name, allowed in (("attention", get_args(Attention)), ("norm", get_args(Norm))):
            if getattr(self, name) not in allowed:
                raise InvalidConfig(f"kernels.{name}={getattr(self, name)!r} is unknown; use one of {list(allowed)}")

    def check(self, precision: Precision, device_type: str) -> None:
        """Raise InvalidConfig if the trainer has no such kernel, or it cannot compute in this format on this device."""
        if self.attention in PREDICTED_ONLY:
            raise InvalidConfig(
                f"kernels.attention={self.attention} is a kernel of other engines that can only be predicted; "
                f"use sdpa-flash or sdpa-math"
            )
        if device_type == "cuda" and self.attention == "sdpa-flash" and precision.compute != "bfloat16":
            raise InvalidConfig(
                f"kernels.attention=sdpa-flash does not compute in precision.compute={precision.compute} on CUDA; "
                f"use precision.compute=bfloat16 or kernels.attention=sdpa-math"
            )
