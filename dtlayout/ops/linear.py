"""Linear layers, where plans, pipelines that split backwards and adapters replace one part of the computation each.

`SplittableLinear.compute` is the one place where a linear layer is computed, but for matmuls that tp overlaps with its
collectives: plans call it with a rank's part of the weight, an adapter surrounds the matmul, `multiply` is the matmul.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

Project = Callable[..., tuple[Tensor, ...]]
"""(a tensor, some `nn.Linear`) → the output of each linear layer."""
Multiply = Callable[[Tensor], Tensor]
"""x [..., in] → x·wᵀ + b [..., out]."""
MakeGradient = Callable[[], Tensor | None]
"""A function that computes the gradient of a weight; None where it adds it to a sum itself."""
Delay = Callable[[MakeGradient], Tensor | None]
"""How a weight's gradient is made → that gradient, or None where it comes later."""


def make_at_once(make: MakeGradient) -> Tensor | None:
    """The delay that delays nothing."""
    return make()


def project(x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Each `linear(x)`: matmuls that read one tensor; a plan may overlap them with gathering that tensor."""
    return tuple(linear(x) for linear in linears)


class SplittableLinear(nn.Linear):
    """An `nn.Linear` of which each part can be replaced: the weight by a rank's part, the matmul, and what an adapter
    computes around it."""

    multiply: Callable[..., Tensor] = staticmethod(F.linear)
    """`F.linear`, or a function with its arguments. Any other for a trained weight takes a `delay` after them, as
    ops/scaled.py does."""
    adapt: Callable[[Any, Multiply, Tensor], Tensor] | None = None
    """(this layer, its matmul, x) → the layer's output with its adapter (ops/adapters.py); None without one."""

    base_format: str = ""
    """Name of the format in which a quantized weight is stored; empty for a weight of numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight, self.bias)

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer's output, of its weight and bias as they are given."""
        if self.adapt is None:
            return self.multiply(x, weight, bias)
        return self.adapt(self, partial(self.multiply, weight=weight, bias=bias), x)
