"""Matmuls in fp8: torchao's layers to the bit, whole or in parts."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear

from dtlayout.ops.scaled import multiply_rowwise, multiply_tensorwise

MULTIPLY = {"tensorwise": multiply_tensorwise, "rowwise": multiply_rowwise}
FORMATS = [torch.bfloat16, torch.float32]


def make(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Numbers of which some columns are a hundred times as large as others."""
    generator = torch.Generator().manual_seed(seed)
    widths = torch.randn(shape[-1], generator=generator).mul(2).exp()
    return (torch.randn(*shape, generator=generator) * widths).to(dtype).requires_grad_()


def differentiate(output: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    gradient = make(*output.shape, dtype=output.dtype, seed=3).detach() * 1e-6
    return output.detach(), *torch.autograd.grad(output, of, gradient)


def note(found: list[Tensor], tensor: Tensor) -> Tensor:
    found.append(tensor)
    return tensor


@pytest.mark.parametrize("name", MULTIPLY)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(2, 16, 48), (32, 48), (3, 5, 48)], ids=str)
def test_output_and_gradients_are_those_of_torchao_to_the_bit(name, dtype, shape):
    linear = nn.Linear(48, 64, dtype=dtype)
    linear.weight, linear.bias = nn.Parameter(make(64, 48, dtype=dtype, seed=2)), nn.Parameter(make(64, dtype=dtype))
    theirs = Float8Linear.from_float(linear, Float8LinearConfig.from_recipe_name(name))
    x = make(*shape, dtype=dtype)
    expected = differentiate(theirs(x), x, theirs.weight, theirs.bias)
    found = differentiate(MULTIPLY[name](x, linear.weight, linear.bias), x, linear.weight, linear.bias)
    assert all(map(torch.equal, found, expected))
    plain = differentiate(linear(x), x, linear.weight, linear.bias)
    for got, exact in zip(found, plain, strict=True):
        assert (got - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("name", MULTIPLY)
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(name):
    x, weight = torch.zeros(16, 32, requires_grad=True), torch.zeros(48, 32, requires_grad=True)
    assert all(each.eq(0).all() for each in differentiate(MULTIPLY[name](x, weight), x, weight))
    x = torch.ones(16, 32)
    x[3, 4] = torch.nan
    assert MULTIPLY[name](x, torch.ones(48, 32))[3].isnan().all()


@pytest.mark.parametrize("name", MULTIPLY)
def test_backward_keeps_what_came_and_of_a_frozen_weight_no_input(name):
    x, weight = make(16, 32, dtype=torch.bfloat16), make(48, 32, dtype=torch.bfloat16)
    for trains in (True, False):
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(partial(note, kept), lambda each: each):
            output = MULTIPLY[name](x, weight.detach().requires_grad_(trains))
        large = {each.data_ptr() for each in kept if each.numel() > 2}
        assert large == {weight.data_ptr(), *[x.data_ptr()] * trains}
        output.sum().backward()


@pytest.mark.parametrize("name", MULTIPLY)
def test_a_weights_gradient_that_is_put_off_has_the_same_bits(name):
    x, weight = make(16, 32, dtype=torch.bfloat16), make(48, 32, dtype=torch.bfloat16, seed=2)
    _, of_x, of_weight = differentiate(MULTIPLY[name](x, weight), x, weight)
    put_off = []
    output = MULTIPLY[name](x, weight, None, put_off.append)
    (found,) = torch.autograd.grad(output, [x], make(16, 48, dtype=torch.bfloat16, seed=3).detach() * 1e-6)
    assert torch.equal(found, of_x) and len(put_off) == 1 and torch.equal(put_off[0](), of_weight)


def test_parts_with_the_largest_numbers_of_the_whole_make_what_the_whole_makes():
    """Split by outputs every number is the same; split by inputs, terms add up to it."""
    x, weight = make(16, 64, dtype=torch.float32), make(96, 64, dtype=torch.float32, seed=2)
    largest = torch.stack([each.detach().abs().max() for each in (x, weight)])
    output, of_x, of_weight = differentiate(multiply_tensorwise(x, weight), x, weight)
    gradient = make(16, 96, dtype=torch.float32, seed=3).detach() * 1e-6
    found = []
    for rows in (slice(0, 32), slice(32, 96)):
        part = multiply_tensorwise(x, weight[rows], None, lambda make: make(), lambda own: largest,
                                   lambda own: gradient.abs().max())  # fmt: skip
        found.append((part, *torch.autograd.grad(part, [x, weight], gradient[:, rows].contiguous())))
    assert torch.equal(torch.cat([part for part, *_ in found], 1), output)
    assert (found[0][1] + found[1][1] - of_x).norm() < 1e-6 * of_x.norm()
    assert torch.equal(found[0][2] + found[1][2], of_weight)
    terms = []
    for columns in (slice(0, 16), slice(16, 64)):
        part = x[:, columns].detach().contiguous().requires_grad_(), weight[:, columns].detach().contiguous()
        part[1].requires_grad_()
        term = multiply_tensorwise(*part, None, lambda make: make(), lambda own: largest)
        terms.append((term, *torch.autograd.grad(term, part, gradient)))
    assert (terms[0][0] + terms[1][0] - output).norm() < 1e-6 * output.norm()
    assert torch.equal(torch.cat([of_part for _, of_part, _ in terms], 1), of_x)
    assert torch.equal(torch.cat([of_part for *_, of_part in terms], 1), of_weight)
