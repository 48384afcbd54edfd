"""Comparing liger-kernel's operations on a GPU with a float64 reference."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dtlayout.spec.kernel_table import find_packages

_MISSING = [
    reason
    for reason, is_here in (
        ("no CUDA device here", torch.cuda.is_available()),
        ("liger-kernel is not installed", "liger_kernel" in find_packages()),
    )
    if not is_here
]
needs_liger = pytest.mark.skipif(bool(_MISSING), reason=f"liger-kernel on CUDA: {', '.join(_MISSING)}")
_TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 1e-5}


def compare(
    function: Callable[..., Any], reference: Callable[..., Any], inputs: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """Results and gradients are the reference's in float64, as far as `dtype` allows, and the inputs stay what they
    were."""
    ours = [t.to(dtype).cuda().requires_grad_() for t in inputs]
    exact = [t.detach().double().cpu().requires_grad_() for t in ours]
    got, expected = _as_tuple(function(*ours)), _as_tuple(reference(*exact))
    for tensor, before in zip(ours, exact, strict=True):
        assert torch.equal(tensor.detach().double().cpu(), before.detach())
    got += torch.autograd.grad([t.sum() for t in got], ours)
    expected += torch.autograd.grad([t.sum() for t in expected], exact)
    for tensor, wanted in zip(got, expected, strict=True):
        assert tensor.dtype == dtype
        error = (tensor.double().cpu() - wanted).norm() / wanted.norm()
        assert error < _TOLERANCE[dtype], error


def _as_tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
