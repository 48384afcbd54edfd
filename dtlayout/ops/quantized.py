"""Frozen weights of few bits: codes and scales, and a matmul that computes the weight out of them when it is needed.

A weight [N, D] is two parameters, so that tp splits them, FSDP2 shards and gathers them, and a dry run counts them like
any others: codes, uint8 [N, D · bits / 8], and scales in the compute format, one for each block of a row. Blocks lie in
rows, and so a weight has the same codes in every layout.

Backward computes the weight again: what autograd would keep of it is larger than the model.

nf4 is the format of QLoRA (arXiv:2305.14314, app. E): 16 values that are equally likely in a normal distribution,
scaled by the largest magnitude of 64 neighbours. Its scales are not quantized again as they are there.

Legend: N rows, D columns, C bytes of a row, S scales of a row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from dtlayout.spec.base_format import BASE_FORMATS, BaseFormat

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Values of the codes 0 to 15: the 16 numbers of arXiv:2305.14314, app. E."""


class Quantizer(NamedTuple):
    """The two directions of a format."""

    quantize: Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]
    """Rows [N, D] and the format of scales → codes [N, C] and scales [N, S]."""
    dequantize: Callable[[Tensor, Tensor], Tensor]
    """Codes [N, C] and scales [N, S] → rows [N, D] in the format of the scales."""


def _quantize_nf4(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    blocks, scales = _scale_blocks(rows, BASE_FORMATS["nf4"].block, dtype, largest=1.0)
    values = torch.tensor(_NF4, dtype=blocks.dtype, device=rows.device)
    codes = torch.bucketize(blocks, (values[1:] + values[:-1]) / 2).to(torch.uint8).flatten(1)
    return codes[:, ::2] * 16 + codes[:, 1::2], scales


def _dequantize_nf4(codes: Tensor, scales: Tensor) -> Tensor:
    values = torch.tensor(_NF4, dtype=scales.dtype).to(scales.device, non_blocking=True)
    pairs = torch.stack((values.repeat_interleave(16), values.repeat(16)), 1)  # of the two codes of each byte
    # A byte at a time: indices of single codes would take twice the memory of the weight.
    rows = F.embedding(codes.int(), pairs).flatten(1)
    rows.view(*scales.shape, -1).mul_(scales[..., None])
    return rows


def _quantize_int8(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    blocks, scales = _scale_blocks(rows, BASE_FORMATS["int8"].block, dtype, largest=127.0)
    return blocks.round().clamp(-127, 127).to(torch.int8).flatten(1).view(torch.uint8), scales


def _dequantize_int8(codes: Tensor, scales: Tensor) -> Tensor:
    rows = codes.view(torch.int8).to(scales.dtype)
    rows.view(*scales.shape, -1).mul_(scales[..., None])
    return rows


def _scale_blocks(rows: Tensor, block: int, dtype: torch.dtype, *, largest: float) -> tuple[Tensor, Tensor]:
    """Blocks [N, S, block] over their scales [N, S], so that magnitudes reach `largest`; blocks of zeros have 0."""
    exact = rows.to(torch.promote_types(rows.dtype, torch.float32)).unflatten(1, (-1, block))
    scales = (exact.abs().amax(-1) / largest).to(dtype)
    divisors = torch.where(scales == 0, 1, scales).to(exact.dtype)  # of the scale as it is kept
    return exact / divisors[..., None], scales


QUANTIZERS: dict[str, Quantizer] = {
    "nf4": Quantizer(_quantize_nf4, _dequantize_nf4),
    "int8": Quantizer(_quantize_int8, _dequantize_int8),
}
"""Name in `precision.base` → both directions."""


def multiply_quantized(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, name: str) -> Tensor:
    """x·wᵀ + b of x […, D], the weight in a format of this name, and b [N]; the weight gets no gradient."""
    output: Tensor = _MultiplyQuantized.apply(x, codes, scales, QUANTIZERS[name])
    return output if bias is None else output + bias


class _MultiplyQuantized(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, quantizer: Quantizer) -> Tensor:
        ctx.quantizer = quantizer
        ctx.save_for_backward(codes, scales)
        return F.linear(x, quantizer.dequantize(codes, scales))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        codes, scales = ctx.saved_tensors
        of_x = gradients[0] @ ctx.quantizer.dequantize(codes, scales) if ctx.needs_input_grad[0] else None
        return of_x, None, None, None


class QuantizedRows:
    """Rows of a quantized weight as memory that takes values: whoever fills weights need not know their format."""

    def __init__(self, codes: Tensor, scales: Tensor, base_format: BaseFormat):
        """Codes [N, C] and scales [N, S] of the same rows, which `copy_` overwrites."""
        self.codes, self.scales, self.format = codes, scales, base_format
        self.shape = torch.Size((codes.shape[0], codes.shape[1] * 8 // base_format.bits))
        self.device, self.dtype = codes.device, scales.dtype

    def __getitem__(self, rows: slice) -> "QuantizedRows":
        return QuantizedRows(self.codes[rows], self.scales[rows], self.format)

    def split(self, num_rows: int) -> list["QuantizedRows"]:
        """Parts of so many rows; the last may have fewer."""
        return [self[first : first + num_rows] for first in range(0, max(1, self.shape[0]), num_rows)]

    @torch.no_grad()
    def copy_(self, values: Tensor) -> None:
        """Quantize values [N, D] of any float format, rounded to the format of the scales first."""
        codes, scales = QUANTIZERS[self.format.name].quantize(values.to(self.dtype), self.dtype)
        self.codes.copy_(codes)
        self.scales.copy_(scales)
