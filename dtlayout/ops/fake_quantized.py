"""Fake quantization: a linear layer multiplies by the values that codes of few bits would have; the full weight trains.

The two formats are those in which an export stores weights (`spec.export_format`), with the same bits: whoever trains
with int4 and exports int4 gets the weights that the training multiplied by. They are torchao's `IntxFakeQuantizer` of
the weight in fp32, symmetric in rows for int8, and with a zero point for each group for int4.

| format | codes | w ≈ | scales |
|---|---|---|---|
| int8 | -128 to 127 | scale · code | one in fp32 for each row |
| int4 | 0 to 15 | scale · (code - 8) + zero | a scale and a zero in bf16 for each group |

The gradient goes straight through: that of the values is that of the weight. torchao gives none to a number whose code
is clamped, which in int8 is the largest one of a row where it is positive: 127.5 rounds to 128. Here it trains like all
others, and the second part of a split backward, for which FSDP2 has no weight any more, needs none.

Backward keeps the weight and its scales, and quantizes again for the gradient of the input: the values of every
microbatch that waits for its backward would be copies of the model. Where ranks hold parts of rows, `share` gives the
largest magnitudes of the whole.

Legend: T tokens, D inputs, N outputs, G columns of a group.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from dtlayout.ops.linear import Delay, make_at_once
from dtlayout.ops.scaled import Share, alone
from dtlayout.spec.export_format import EXPORT_FORMATS

_GROUP = EXPORT_FORMATS["int4"].group
_LEAST_ROW_SCALE = torch.finfo(torch.float32).eps
_LEAST_GROUP_SCALE = 1e-6
"""Scales of weights that are all 0, as torchao has them."""

Scales = tuple[Tensor, ...]
"""The numbers by which codes of a weight [N, D] become values; each has a number for each row or group."""


class FakeQuantizer(NamedTuple):
    """The functions of a format. Those of an exact tensor overwrite it: a weight in fp32 or finer, a copy."""

    find_scales: Callable[[Tensor, Share], Scales]
    """Weight → its scales."""
    find_codes: Callable[[Tensor, Scales], Tensor]
    """Exact weight → whole numbers, of which some may lie out of range."""
    find_values: Callable[[Tensor, Scales], Tensor]
    """Codes → the weight that they stand for."""
    least: int
    """Lowest code."""
    most: int
    """Highest code."""

    def quantize(self, weight: Tensor, scales: Scales) -> Tensor:
        """Values [N, D] of the codes of a weight, in its format."""
        codes = self.find_codes(copy_exact(weight), scales).clamp_(self.least, self.most)
        return self.find_values(codes, scales).to(weight.dtype)


def copy_exact(weight: Tensor) -> Tensor:
    """A copy in fp32, or in the weight's format where that is finer."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)


def _scale_rows(weight: Tensor, share: Share) -> Scales:
    least, most = weight.aminmax(dim=1, keepdim=True)
    largest = torch.maximum(-least, most)
    largest = share(largest.to(torch.promote_types(weight.dtype, torch.float32)))
    return ((largest / 127.5).clamp(min=_LEAST_ROW_SCALE),)


def _code_rows(exact: Tensor, scales: Scales) -> Tensor:
    return exact.mul_(1.0 / scales[0]).round_()


def _value_rows(codes: Tensor, scales: Scales) -> Tensor:
    return codes.mul_(scales[0])


def _scale_groups(weight: Tensor, share: Share) -> Scales:
    """A scale and a zero [N, D / G, 1] of each group, which one rank holds whole."""
    least, most = weight.unflatten(1, (-1, _GROUP)).aminmax(dim=-1, keepdim=True)
    exact = torch.promote_types(weight.dtype, torch.float32)
    least, most = least.to(exact), most.to(exact)
    scales = ((most - least) / 15).clamp(min=_LEAST_GROUP_SCALE)
    return scales.bfloat16(), (least + 8 * scales).bfloat16()


def _code_groups(exact: Tensor, scales: Scales) -> Tensor:
    step, zero = scales
    least = zero - 8 * step  # in bf16, as torchao has it
    exact.view(*step.shape[:2], _GROUP).sub_(least).div_(step).round_()
    return exact


def _value_groups(codes: Tensor, scales: Scales) -> Tensor:
    step, zero = scales
    codes.view(*step.shape[:2], _GROUP).sub_(8).mul_(step).add_(zero)
    return codes


FAKE_QUANTIZERS: dict[str, FakeQuantizer] = {
    "int8": FakeQuantizer(_scale_rows, _code_rows, _value_rows, -128, 127),
    "int4": FakeQuantizer(_scale_groups, _code_groups, _value_groups, 0, 15),
}
"""Name in `precision.fake_quant` → functions."""


def multiply_fake_quantized(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    delay: Delay = make_at_once,
    *,
    name: str,
    share: Share = alone,
) -> Tensor:
    """x·qᵀ + b […, N] of x […, D], the values q [N, D] of the weight's codes in the format of this name, and bias [N].

    `share` gets the largest magnitudes [N, 1] of this rank's part of each row. Backward hands `delay` how the weight's
    gradient is made.
    """
    output: Tensor = _MultiplyFakeQuantized.apply(x, weight, delay, FAKE_QUANTIZERS[name], share)
    return output if bias is None else output + bias


class _MultiplyFakeQuantized(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, delay: Delay, quantizer: FakeQuantizer, share: Share) -> Tensor:
        ctx.delay, ctx.quantizer = delay, quantizer
        scales = quantizer.find_scales(weight, share)
        of_x, of_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, *(weight, *scales) * of_x)
        return F.linear(x, quantizer.quantize(weight, scales))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *kept = ctx.saved_tensors
        of_x, of_weight, *_ = ctx.needs_input_grad
        made: list[Tensor | None] = [None, None]
        if of_x:
            weight, *scales = kept
            made[0] = gradients[0] @ ctx.quantizer.quantize(weight, tuple(scales))
        if of_weight:
            # Saved as it was, x would keep the graph behind it.
            made[1] = ctx.delay(partial(_differentiate, gradients[0].flatten(0, -2), x.detach().flatten(0, -2)))
        return *made, None, None, None


def _differentiate(gradient_TN: Tensor, x_TD: Tensor) -> Tensor:
    return gradient_TN.t() @ x_TD
