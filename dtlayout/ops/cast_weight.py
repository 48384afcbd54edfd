"""A weight in fp8 that autograd takes for one in the compute format: what FSDP2 gathers for matmuls with one scale.

Its numbers and its scale are plain tensors. `multiply_tensorwise` reads them; its gradient is a plain tensor in the
compute format. Views for a whole weight keep the format, and whatever else reads the weight gets its numbers back in
the compute format.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_KEEPING = {
    _aten.detach.default, _aten.alias.default, _aten.as_strided.default, _aten.view.default, _aten._unsafe_view.default,
}  # fmt: skip
"""Operators that change no number: their result is such a weight too."""


class CastWeight(Tensor):
    """A matrix in e4m3 with one scale, which says that its format is another one."""

    numbers: Tensor
    """The numbers times their scale, in e4m3."""
    scale: Tensor
    """The scale, one number in fp32."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor, dtype: torch.dtype) -> "CastWeight":
        """Take the numbers and their scale; `dtype` is the compute format."""
        made: CastWeight = Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(), dtype=dtype,
            layout=values.layout, device=values.device,
        )  # fmt: skip
        made.numbers, made.scale = values, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["numbers", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> "CastWeight":
        return CastWeight(inner["numbers"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _KEEPING:
            weight, *others = args
            return CastWeight(func(weight.numbers, *others, **(kwargs or {})), weight.scale, weight.dtype)
        return func(*tree_map_only(cls, cls.widen, args), **tree_map_only(cls, cls.widen, kwargs or {}))

    def widen(self) -> Tensor:
        """The numbers in the compute format, as a plain tensor."""
        return (self.numbers.float() / self.scale).to(self.dtype)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"CastWeight({tuple(self.shape)}, {self.dtype}, scale={self.scale})"
