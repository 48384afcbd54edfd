"""Weights rounded to few bits: torchao's fake quantizers and our exports, to the bit."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchao.quantization.qat import IntxFakeQuantizeConfig
from torchao.quantization.qat.fake_quantizer import IntxFakeQuantizer
from torchao.quantization.quant_primitives import ZeroPointDomain

from dtlayout.checkpoint.export_quantizers import EXPORT_QUANTIZERS
from dtlayout.ops.fake_quantized import FAKE_QUANTIZERS, copy_exact, multiply_fake_quantized
from dtlayout.ops.scaled import alone

THEIRS = {
    "int8": IntxFakeQuantizeConfig(torch.int8, "per_channel", eps=torch.finfo(torch.float32).eps),
    "int4": IntxFakeQuantizeConfig(
        torch.uint4, group_size=128, is_symmetric=False, zero_point_domain=ZeroPointDomain.FLOAT,
        scale_precision=torch.bfloat16, zero_point_precision=torch.bfloat16,
    ),
}  # fmt: skip


def make(*shape: int, dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    """Numbers of which some columns are larger than others, some groups are 0, and one row is."""
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(*shape, generator=generator) * torch.randn(shape[-1], generator=generator).exp() + mean
    values[3], values[5, :128] = 0, 0
    return values.to(dtype).requires_grad_()


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FAKE_QUANTIZERS)
def test_output_and_gradients_are_torchaos_but_where_it_clamps(name: str, dtype: torch.dtype, mean: float) -> None:
    """torchao gives a clamped number no gradient, and multiplies others by their scale and divides them again."""
    x, weight, bias = make(8, 256, dtype=dtype), make(96, 256, dtype=dtype, mean=mean), make(96, 256, dtype=dtype)[:, 0]
    values = IntxFakeQuantizer(THEIRS[name])(weight.float()).to(dtype)
    theirs, ours = F.linear(x, values), multiply_fake_quantized(x, weight, name=name)
    assert torch.equal(theirs, ours)
    assert torch.equal(multiply_fake_quantized(x, weight, bias, name=name), ours + bias)
    gradient = torch.randn(ours.shape, generator=torch.Generator().manual_seed(6)).to(dtype)
    (of_x, of_weight), found = (torch.autograd.grad(each, [x, weight], gradient) for each in (theirs, ours))
    assert torch.equal(of_x, found[0])
    quantizer = FAKE_QUANTIZERS[name]
    exact = weight.detach()
    codes = quantizer.find_codes(copy_exact(exact), quantizer.find_scales(exact, alone))
    is_clamped = (codes < quantizer.least) | (codes > quantizer.most)
    assert is_clamped.sum(1).max() == (name == "int8"), "one of a row at most, its largest"
    if dtype == torch.float32:
        assert torch.allclose(of_weight, found[1].masked_fill(is_clamped, 0), rtol=3e-7, atol=0)
    else:
        assert torch.equal(of_weight, found[1].masked_fill(is_clamped, 0))


@pytest.mark.parametrize("name", FAKE_QUANTIZERS)
def test_an_export_has_the_weights_that_were_multiplied_by(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight, quantizer, export = make(96, 384, dtype=dtype).detach(), FAKE_QUANTIZERS[name], EXPORT_QUANTIZERS[name]
        values = quantizer.quantize(weight, quantizer.find_scales(weight, alone))
        assert torch.equal(values, export.dequantize(export.quantize(weight.float())).to(dtype))
        assert 0.002 < (values - weight).norm() / weight.norm() < 0.3


def test_parts_of_rows_that_share_their_largest_numbers_are_those_of_the_whole() -> None:
    x, weight = make(8, 256, dtype=torch.float64).detach(), make(96, 256, dtype=torch.float64).detach()
    largest = weight.abs().amax(1, keepdim=True)
    parts = [
        multiply_fake_quantized(x[:, columns], weight[:, columns], name="int8", share=lambda own: largest)
        for columns in (slice(0, 64), slice(64, 256))
    ]
    whole = multiply_fake_quantized(x, weight, name="int8")
    assert torch.allclose(sum(parts), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FAKE_QUANTIZERS)
def test_backward_keeps_the_weight_and_a_put_off_gradient_does_not_need_it(name: str) -> None:
    x, weight = make(8, 256, dtype=torch.bfloat16), make(96, 256, dtype=torch.bfloat16)
    kept: list[Tensor] = []
    put_off: list[partial[Tensor]] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda each: each):
        output = multiply_fake_quantized(x, weight, None, put_off.append, name=name)
    assert {each.data_ptr() for each in kept if each.numel() > 400} == {x.data_ptr(), weight.data_ptr()}
    gradient = torch.ones_like(output)
    torch.autograd.grad(output, [x], gradient, retain_graph=True)
    (make_gradient,) = put_off
    weight.data.fill_(torch.nan)
    assert torch.equal(make_gradient(), gradient.t() @ x.detach())
