"""Adapters beside frozen linear layers: LoRA's two thin matmuls, and (IA)³'s vector, with the names of PEFT."""

from typing import Any

import torch
from torch import Tensor, nn

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.toml import describe_unknown_key
from dtlayout.ops.linear import Multiply, SplittableLinear
from dtlayout.spec.adapter import IA3_INPUTS, Adapter


class ScaleVector(nn.Module):
    """A factor for each element of a token."""

    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def add_adapters(module: nn.Module, adapter: Adapter) -> list[str]:
    """Freeze a model of one's own, and give the linear layers that `adapter.targets` name an adapter; their names.

    A target is the end of a name; without any every linear layer gets one. A LoRA begins as nothing: A is drawn from
    torch's generator as the layer's own weight would be, B is 0. Names of modules are PEFT's: lora_A, lora_B, ia3.
    InvalidConfig for a target that is the end of no linear layer's name.
    """
    linears = {name: each for name, each in module.named_modules() if type(each) in (nn.Linear, SplittableLinear)}
    chosen = [name for name in linears if not adapter.targets or name.endswith(adapter.targets)]
    missing = [target for target in adapter.targets if not any(name.endswith(target) for name in linears)]
    if missing:
        ends = dict.fromkeys(repr(name.rpartition(".")[2]) for name in linears)
        raise InvalidConfig([f"adapter.targets: {describe_unknown_key(repr(each), ends)}" for each in missing])
    module.requires_grad_(False)
    for name in chosen:
        linear = linears[name]
        if adapter.method == "lora":
            add_low_rank(linear, adapter.rank, adapter.scale)
            nn.init.kaiming_uniform_(linear.lora_A.weight, a=5**0.5)
            nn.init.zeros_(linear.lora_B.weight)
        else:
            add_scale(linear, of_input=name.endswith(IA3_INPUTS))
    return chosen


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
