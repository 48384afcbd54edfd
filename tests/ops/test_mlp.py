"""SwiGLU: silu(gate) · up, forward and backward."""

import pytest
import torch
from liger import compare, needs_liger
from torch import Tensor

from dtlayout.ops.mlp import eager_swiglu, liger_swiglu

GATE, UP = torch.randn(2, 3, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + (-gate).exp()) * up


def test_it_is_the_formula_with_its_gradients():
    inputs = GATE.clone().requires_grad_(), UP.clone().requires_grad_()
    results = [function(*inputs) for function in (eager_swiglu, swiglu)]
    torch.testing.assert_close(*results, rtol=1e-13, atol=1e-13)
    gradients = [torch.autograd.grad((out * UP).sum(), inputs) for out in results]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@needs_liger
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ligers_is_the_formula_on_cuda(dtype):
    compare(liger_swiglu, swiglu, [GATE, UP], dtype)
