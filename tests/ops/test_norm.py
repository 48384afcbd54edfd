"""RMSNorm: every kernel is the formula, forward and backward."""

import pytest
import torch
from liger import compare, needs_liger
from torch.autograd import gradcheck

from dtlayout.base.errors import KernelError
from dtlayout.ops.norm import RMSNorm, liger_rms_norm
from dtlayout.spec.kernel_records import NormKernel
from dtlayout.spec.kernel_table import find_kernel

EPS = 1e-3
generator = torch.Generator().manual_seed(0)
X = torch.randn(3, 5, 8, dtype=torch.float64, generator=generator)
WEIGHT = torch.randn(8, dtype=torch.float64, generator=generator)

each_kernel = pytest.mark.parametrize("kernel", ["eager", "fused"])  # in float64, which liger does not have


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + EPS) * weight


@each_kernel
def test_it_is_the_formula_in_float64(kernel):
    got = find_kernel(NormKernel, kernel).load()(X, WEIGHT, EPS)
    torch.testing.assert_close(got, rms_norm(X, WEIGHT), rtol=1e-13, atol=1e-13)


@each_kernel
def test_its_gradients_are_those_of_finite_differences(kernel):
    inputs = (X.clone().requires_grad_(), WEIGHT.clone().requires_grad_())
    assert gradcheck(lambda x, w: find_kernel(NormKernel, kernel).load()(x, w, EPS), inputs)


@each_kernel
def test_eps_keeps_zeros_finite(kernel):
    assert torch.equal(find_kernel(NormKernel, kernel).load()(torch.zeros(2, 8), torch.ones(8), EPS), torch.zeros(2, 8))


@each_kernel
def test_statistics_of_bfloat16_are_not_taken_in_bfloat16(kernel):
    """The mean of 4096 squares would lose half of them; the result is as exact as rounding it once or twice allows."""
    x = torch.randn(4, 4096, generator=generator).bfloat16() * 30
    weight = torch.ones(4096, dtype=torch.bfloat16)
    got = find_kernel(NormKernel, kernel).load()(x, weight, EPS)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), rms_norm(x.double(), weight.double()), rtol=2**-8, atol=0)


@each_kernel
def test_the_module_starts_with_weights_of_one_in_its_dtype(kernel):
    module = RMSNorm(8, EPS, kernel, torch.float64)
    assert torch.equal(module.weight, torch.ones(8, dtype=torch.float64))
    torch.testing.assert_close(module(X), rms_norm(X, torch.ones_like(WEIGHT)))


@needs_liger
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 5, 256), (2, 16384, 256)])  # liger-kernel has another kernel for many short rows
def test_ligers_is_the_formula_on_cuda(dtype, shape):
    inputs = [torch.randn(shape, generator=generator), torch.randn(shape[-1], generator=generator)]
    compare(lambda x, w: liger_rms_norm(x, w, EPS), rms_norm, inputs, dtype)


class Wrapped(torch.Tensor):
    """A tensor of another kind, which stays one in all operations, as a DTensor does."""


def test_liger_refuses_what_is_no_plain_tensor():
    with pytest.raises(
        KernelError, match=r"kernels.norm=liger runs on this rank's tensors, .*, or use kernels.norm=fused"
    ):
        liger_rms_norm(X.as_subclass(Wrapped), WEIGHT, EPS)
