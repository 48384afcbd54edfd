"""Quantized weights: codes are the nearest values, and a matmul is one with what they stand for."""

import pytest
import torch

from dtlayout.ops.quantized import _NF4, QUANTIZERS, QuantizedRows, multiply_quantized
from dtlayout.spec.base_format import BASE_FORMATS

BITS = {"nf4": 4.25, "int8": 8.25}


def make_rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * 0.02


@pytest.mark.parametrize(("name", "error"), [("nf4", 0.0925), ("int8", 0.0065)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_normal_weights_come_back_with_the_error_of_their_bits(name, error, dtype):
    rows = make_rows(64, 256).to(dtype)
    codes, scales = QUANTIZERS[name].quantize(rows, dtype)
    back = QUANTIZERS[name].dequantize(codes, scales)
    assert back.shape == rows.shape and back.dtype == scales.dtype == dtype and codes.dtype == torch.uint8
    assert 0.9 * error < (back - rows).norm() / rows.norm() < error
    assert (codes.nbytes + scales.numel() * 2) * 8 / rows.numel() == BITS[name]
    again = QUANTIZERS[name].quantize(back, dtype)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


def test_each_code_of_nf4_is_the_nearest_of_the_sixteen_values():
    rows = make_rows(8, 128).double()
    codes, scales = QUANTIZERS["nf4"].quantize(rows, torch.float64)
    largest = rows.unflatten(1, (2, 64)).abs().amax(-1)
    torch.testing.assert_close(scales, largest, rtol=0, atol=0)
    distances = (rows / largest.repeat_interleave(64, 1))[..., None] - torch.tensor(_NF4, dtype=torch.float64)
    nearest = distances.abs().argmin(-1)
    assert torch.equal(torch.stack((codes // 16, codes % 16), -1).flatten(1).long(), nearest)


@pytest.mark.parametrize("name", BASE_FORMATS)
def test_zeros_stay_zeros_and_a_matmul_differentiates_its_input(name):
    codes, scales = QUANTIZERS[name].quantize(torch.zeros(2, 64), torch.float32)
    assert QUANTIZERS[name].dequantize(codes, scales).eq(0).all()
    codes, scales = QUANTIZERS[name].quantize(make_rows(6, 64).double(), torch.float64)
    x, bias = make_rows(2, 3, 64).double().requires_grad_(), make_rows(6).double()
    assert torch.autograd.gradcheck(lambda x: multiply_quantized(x, codes, scales, bias, name), (x,))
    expected = x @ QUANTIZERS[name].dequantize(codes, scales).T + bias
    torch.testing.assert_close(multiply_quantized(x, codes, scales, bias, name), expected)


@pytest.mark.parametrize("name", BASE_FORMATS)
def test_backward_keeps_codes_and_scales_and_no_weight(name):
    codes, scales = QUANTIZERS[name].quantize(make_rows(64, 64), torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        multiply_quantized(make_rows(2, 64).requires_grad_(), codes, scales, None, name)
    assert [each.data_ptr() for each in kept] == [codes.data_ptr(), scales.data_ptr()]


@pytest.mark.parametrize("name", BASE_FORMATS)
def test_rows_take_values_in_parts(name):
    rows, columns = make_rows(10, 128), {"nf4": 64, "int8": 128}[name]
    whole = QUANTIZERS[name].quantize(rows.bfloat16(), torch.bfloat16)
    memory = torch.zeros(10, columns, dtype=torch.uint8), torch.zeros(10, 2, dtype=torch.bfloat16)
    part = QuantizedRows(*memory, BASE_FORMATS[name])
    assert part.shape == (10, 128)
    for each, values in zip(part.split(4), rows.split(4), strict=True):
        each.copy_(values)
    assert all(torch.equal(made, expected) for made, expected in zip(memory, whole, strict=True))
