"""Matmuls with weights: where a plan, or a pipeline that splits backwards, may put its own way to compute them."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

Project = Callable[..., tuple[Tensor, ...]]
"""A tensor and some `nn.Linear` → what each makes of it."""


def project(x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Each `linear(x)`: matmuls that read the same, which a plan may compute together with the gathering of it."""
    return tuple(linear(x) for linear in linears)


class SplittableLinear(nn.Linear):
    """An `nn.Linear` whose backward can be split."""

    multiply: Callable[..., Tensor] = staticmethod(F.linear)
    """`F.linear`, or one that computes the same."""

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.weight, self.bias)
