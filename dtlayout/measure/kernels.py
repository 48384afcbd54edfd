"""Which scaled-dot-product attention kernels really ran, whatever was asked for.

The fused ones are operators of their own. The math one is a composite that dissolves into matmuls before a dispatch
mode sees it, but its softmax, `_safe_softmax`, is an operator that PyTorch uses nowhere else.
"""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from dtlayout.measure.storages import any_wraps

_KERNELS = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_flash_attention_forward": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_efficient_attention_forward": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_cudnn_attention_forward": "cudnn",
    "aten::_scaled_dot_product_fused_attention_overrideable": "overrideable",
    "aten::_safe_softmax": "math",
    "flex_attention": "flex",
}
"""Forward operator → kernel."""


class AttentionRecorder(TorchDispatchMode):
    """Counts the attention kernels that run forward inside the `with` block; a recomputed call counts again."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def executed(self) -> set[str]:
        """The kernels that ran: flash, efficient, cudnn, overrideable, math, flex."""
        return set(self.counts)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any_wraps(types):
            return NotImplemented
        if (kernel := _KERNELS.get(func.name())) is not None:
            self.counts[kernel] += 1
        return func(*args, **(kwargs or {}))
