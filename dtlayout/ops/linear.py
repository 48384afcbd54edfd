"""Matmuls with weights, where a plan or a pipeline that splits backwards may replace the computation."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

Project = Callable[..., tuple[Tensor, ...]]
"""(a tensor, some `nn.Linear`) → the output of each linear layer."""


def project(x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Each `linear(x)`: matmuls that read one tensor; a plan may overlap them with gathering that tensor."""
    return tuple(linear(x) for linear in linears)


class SplittableLinear(nn.Linear):
    """An `nn.Linear` whose backward can be split in two."""

    multiply: Callable[..., Tensor] = staticmethod(F.linear)
    """`F.linear`, or a function that computes the same."""

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.weight, self.bias)
