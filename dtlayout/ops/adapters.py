"""Adapters beside frozen linear layers: LoRA's two thin matmuls, and (IA)³'s vector, with the names of PEFT."""

from typing import Any

import torch
from torch import Tensor, nn

from dtlayout.ops.linear import Multiply, SplittableLinear


class ScaleVector(nn.Module):
    """A factor for each element of a token."""

    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def add_low_rank(linear: nn.Linear, rank: int, scale: float) -> None:
    """Give a linear layer the modules `lora_A` and `lora_B`: x·wᵀ + scale · (x·Aᵀ)·Bᵀ, with A [rank, in] and B
    [out, rank]; the initial values come from who fills all weights."""
    dtype = linear.weight.dtype
    _open(linear).adapt = _compute_low_rank
    linear.lora_A = SplittableLinear(linear.in_features, rank, bias=False, dtype=dtype)
    linear.lora_B = SplittableLinear(rank, linear.out_features, bias=False, dtype=dtype)
    linear.lora_scale = scale  # type: ignore[assignment]


def add_scale(linear: nn.Linear, *, of_input: bool) -> None:
    """Give a linear layer the module `ia3`, a vector that multiplies its input, or else its output."""
    _open(linear).adapt = _compute_of_scaled if of_input else _compute_scaled
    linear.ia3 = ScaleVector(linear.in_features if of_input else linear.out_features, linear.weight.dtype)


def _open(linear: nn.Linear) -> SplittableLinear:
    """The layer as one whose computation an adapter can surround."""
    assert type(linear) in (nn.Linear, SplittableLinear), f"{type(linear).__name__} computes in its own way"
    linear.__class__ = SplittableLinear
    assert isinstance(linear, SplittableLinear)
    return linear


def _compute_low_rank(linear: Any, multiply: Multiply, x: Tensor) -> Tensor:
    # Scaled where it is narrow, and not as wide as the result.
    return multiply(x) + linear.lora_B(linear.lora_A(x) * linear.lora_scale)


def _compute_scaled(linear: Any, multiply: Multiply, x: Tensor) -> Tensor:
    return linear.ia3(multiply(x))


def _compute_of_scaled(linear: Any, multiply: Multiply, x: Tensor) -> Tensor:
    return multiply(linear.ia3(x))
