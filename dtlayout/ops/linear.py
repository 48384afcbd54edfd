"""Matmuls that read the same: the place where a plan may compute them together with the gathering of what they read."""

from collections.abc import Callable

from torch import Tensor, nn

Project = Callable[..., tuple[Tensor, ...]]
"""A tensor and some `nn.Linear` → what each makes of it."""


def project(x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Each `linear(x)`."""
    return tuple(linear(x) for linear in linears)
