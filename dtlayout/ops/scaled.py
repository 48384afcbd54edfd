"""Matmuls of linear layers in fp8: tensors of 16 bits or more are scaled, cast, multiplied, and scaled back.

The two recipes are torchao's `tensorwise` and `rowwise`, to the bit. A linear layer has three matmuls, each of two cast
tensors: the output's, and in backward those of the gradients of input and weight. All sums are in fp32 or as the
kernel adds them, all results in the format of the input.

| recipe | scales | input, weight | gradient of the output |
|---|---|---|---|
| fp8-tensorwise | one for a tensor, in all matmuls that read it | e4m3 | e5m2 |
| fp8-rowwise | one for each row along the sum, so others in each matmul; powers of two | e4m3 | e4m3 |

Backward keeps the input as it came, which several layers and operations share, and casts it again. A scale is the
format's largest number over the largest magnitude. Where ranks hold parts of one tensor, `share` gives the largest
magnitude of the whole, so that one scale fits all parts.

Kernels of CUDA want inner sizes that 16 divides; the number of tokens is filled up with zeros, which change no sum.

Legend: T tokens, D inputs, N outputs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from dtlayout.ops.cast_weight import CastWeight
from dtlayout.ops.linear import Delay, make_at_once
from dtlayout.spec.precision import ALIGNMENT

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
"""Formats of numbers and, with one scale for a tensor, of gradients."""
_LEAST_MAGNITUDE = 1e-12
"""Magnitude from which on a tensor is scaled; zeros would have no scale."""

Share = Callable[[Tensor], Tensor]
"""Largest magnitudes of this rank's parts of some tensors → those of the whole tensors."""


class Scaled(NamedTuple):
    """A tensor in fp8."""

    values: Tensor
    """The numbers times their scales."""
    scale: Tensor
    """One scale, or of a matrix one for each row [T, 1] or column [1, N]; fp32."""

    def t(self) -> "Scaled":
        """The transpose."""
        return Scaled(self.values.t(), self.scale.t())


def alone(largest: Tensor) -> Tensor:
    """The `share` of a rank that holds whole tensors."""
    return largest


def multiply_tensorwise(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    delay: Delay = make_at_once,
    share: Share = alone,
    share_gradient: Share = alone,
) -> Tensor:
    """x·wᵀ + b […, N] of x […, D], weight [N, D] and bias [N], with one scale for each tensor.

    `share` gets the largest magnitudes of this rank's x and weight [2], or of its x alone [1] where the weight is a
    `CastWeight`, `share_gradient` that of its gradient of the output. Backward hands `delay` how the weight's gradient
    is made.
    """
    output: Tensor = _Tensorwise.apply(x, weight, delay, share, share_gradient)
    return output if bias is None else output + bias


def multiply_rowwise(x: Tensor, weight: Tensor, bias: Tensor | None = None, delay: Delay = make_at_once) -> Tensor:
    """x·wᵀ + b […, N] of x […, D], weight [N, D] and bias [N], with a scale for each row along the sum.

    Backward hands `delay` how the weight's gradient is made.
    """
    output: Tensor = _Rowwise.apply(x, weight, delay)
    return output if bias is None else output + bias


class CastRecipe(NamedTuple):
    """The matmuls of a linear layer by itself, of matrices as they come; each finds all scales that it needs."""

    output: Callable[[Tensor, Tensor], Tensor]
    """x [T, D] and weight [N, D] → x·wᵀ [T, N]."""
    input_gradient: Callable[[Tensor, Tensor], Tensor]
    """Gradient of the output [T, N] and weight [N, D] → gradient of x [T, D]."""
    weight_gradient: Callable[[Tensor, Tensor], Tensor]
    """Gradient of the output [T, N] and x [T, D] → gradient of the weight [N, D]."""


class _Tensorwise(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, delay: Delay, share: Share, share_gradient: Share
    ) -> Tensor:  # fmt: skip
        ctx.delay, ctx.share = delay, share_gradient
        if isinstance(weight, CastWeight):
            scales = find_scales(share(find_magnitude(x).view(1)), E4M3)
        else:
            scales = find_scales(share(torch.stack((find_magnitude(x), find_magnitude(weight)))), E4M3)
        of_x, of_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None, scales)
        x_TD, weight_ND = cast(x.flatten(0, -2), scales[0], E4M3), _cast_weight(weight, scales)
        return _multiply(x_TD, weight_ND.t(), x.dtype, fast=True).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        gradient_TN, (of_x, of_weight, *_) = gradients[0].flatten(0, -2), ctx.needs_input_grad
        scale = find_scales(ctx.share(find_magnitude(gradient_TN)), E5M2)
        made: list[Tensor | None] = [None, None]
        if of_x:
            cast_TN, weight_ND = cast(gradient_TN, scale, E5M2), _cast_weight(weight, scales)
            made[0] = _multiply(cast_TN, weight_ND, gradient_TN.dtype).view(*gradients[0].shape[:-1], -1)
            del cast_TN, weight_ND
        if of_weight:
            # Saved as it was, x would keep the graph behind it.
            rows_TD = x.detach().flatten(0, -2)
            made[1] = ctx.delay(partial(_differentiate_tensorwise, gradient_TN, scale, rows_TD, scales[0]))
        return *made, None, None, None


def _cast_weight(weight: Tensor, scales: Tensor) -> Scaled:
    """A weight in e4m3, by the second of `scales` or as it was gathered."""
    return Scaled(weight.numbers, weight.scale) if isinstance(weight, CastWeight) else cast(weight, scales[1], E4M3)


def _differentiate_tensorwise(gradient_TN: Tensor, scale: Tensor, x_TD: Tensor, scale_of_x: Tensor) -> Tensor:
    left, right = cast(_fill_up(gradient_TN), scale, E5M2), cast(_fill_up(x_TD), scale_of_x, E4M3)
    return _multiply(left.t(), right, x_TD.dtype)


class _Rowwise(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, delay: Delay) -> Tensor:
        ctx.delay = delay
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        return ROWWISE.output(x.flatten(0, -2), weight).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient_TN, (of_x, of_weight, _) = gradients[0].flatten(0, -2), ctx.needs_input_grad
        made: list[Tensor | None] = [None, None]
        if of_x:
            made[0] = ROWWISE.input_gradient(gradient_TN, weight).view(*gradients[0].shape[:-1], -1)
        if of_weight:
            # Saved as it was, x would keep the graph behind it.
            made[1] = ctx.delay(partial(ROWWISE.weight_gradient, gradient_TN, x.detach().flatten(0, -2)))
        return *made, None


def find_magnitude(x: Tensor) -> Tensor:
    """Largest magnitude of a tensor, a scalar in fp32."""
    return x.abs().amax().float()


def find_scales(largest: Tensor, fmt: torch.dtype) -> Tensor:
    """Scales in fp32 for numbers up to these magnitudes in `fmt`."""
    # In fp64, since compiled and eager kernels divide fp32 differently.
    return (torch.finfo(fmt).max / largest.double().clamp(min=_LEAST_MAGNITUDE)).float()


def cast(x: Tensor, scale: Tensor, fmt: torch.dtype) -> Scaled:
    """A tensor times its scale in `fmt`; what the format cannot hold becomes its largest number."""
    largest = torch.finfo(fmt).max
    exact = x.to(torch.float32, copy=True).mul_(scale).clamp_(-largest, largest)  # torch 2.11 casts others to nan
    return Scaled(exact.to(fmt), scale)


def _cast_along(x: Tensor, dim: int) -> Scaled:
    """A matrix in e4m3, with a scale for all elements along `dim`: the power of two below the exact one."""
    exact = find_scales(x.abs().amax(dim, keepdim=True), E4M3)
    return cast(x, torch.exp2(torch.floor(torch.log2(exact))), E4M3)


def _fill_up(x: Tensor) -> Tensor:
    """A matrix with rows of zeros below, so that kernels take their number."""
    return F.pad(x, (0, 0, 0, missing)) if (missing := -len(x) % ALIGNMENT) else x


def _multiply(left: Scaled, right: Scaled, fmt: torch.dtype, *, fast: bool = False) -> Tensor:
    """The product of two cast matrices in `fmt`; `fast` lets the kernel add up in fewer bits.

    Kernels read the left one along its rows and the right one along its columns, and the other order is copied. With a
    scale for each row they give bf16 alone.
    """
    result = torch.bfloat16 if left.scale.dim() == 2 else fmt
    values = left.values.contiguous(), right.values.t().contiguous().t()
    scales = left.scale.reciprocal(), right.scale.reciprocal()
    return torch._scaled_mm(*values, *scales, out_dtype=result, use_fast_accum=fast).to(fmt)


def _multiply_and_scale(left: Scaled, right: Scaled, fmt: torch.dtype) -> Tensor:
    """The product of two cast matrices with a scale for each row, in `fmt`, added up in all bits.

    CUDA's kernel that scales rows itself is slow if it adds up in all bits. Scales are powers of two, and so a product
    is the same whether it is rounded before or after them.
    """
    one = left.scale.new_ones(())
    product = _multiply(Scaled(left.values, one), Scaled(right.values, one), torch.bfloat16)
    return product.mul_(left.scale.reciprocal()).mul_(right.scale.reciprocal()).to(fmt)


def _multiply_rows(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    return _multiply(_cast_along(x_TD, 1), _cast_along(weight_ND, 1).t(), x_TD.dtype, fast=True)


def _differentiate_rows(gradient_TN: Tensor, weight_ND: Tensor) -> Tensor:
    return _multiply_and_scale(_cast_along(gradient_TN, 1), _cast_along(weight_ND, 0), gradient_TN.dtype)


def _differentiate_weight_of_rows(gradient_TN: Tensor, x_TD: Tensor) -> Tensor:
    left, right = _cast_along(_fill_up(gradient_TN), 0), _cast_along(_fill_up(x_TD), 0)
    return _multiply_and_scale(left.t(), right, x_TD.dtype)


def _cast_whole(x: Tensor, fmt: torch.dtype) -> Scaled:
    """A matrix with one scale of its own."""
    return cast(x, find_scales(find_magnitude(x), fmt), fmt)


def _multiply_whole(x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    return _multiply(_cast_whole(x_TD, E4M3), _cast_whole(weight_ND, E4M3).t(), x_TD.dtype, fast=True)


def _differentiate_whole(gradient_TN: Tensor, weight_ND: Tensor) -> Tensor:
    return _multiply(_cast_whole(gradient_TN, E5M2), _cast_whole(weight_ND, E4M3), gradient_TN.dtype)


def _differentiate_weight_of_whole(gradient_TN: Tensor, x_TD: Tensor) -> Tensor:
    of_gradient, of_x = find_scales(find_magnitude(gradient_TN), E5M2), find_scales(find_magnitude(x_TD), E4M3)
    return _differentiate_tensorwise(gradient_TN, of_gradient, x_TD, of_x)


TENSORWISE = CastRecipe(_multiply_whole, _differentiate_whole, _differentiate_weight_of_whole)
"""`multiply_tensorwise` and its gradients, where no scale is shared."""
ROWWISE = CastRecipe(_multiply_rows, _differentiate_rows, _differentiate_weight_of_rows)
"""`multiply_rowwise` and its gradients."""
RECIPES = {"fp8-tensorwise": TENSORWISE, "fp8-rowwise": ROWWISE}
"""Name in `precision.matmuls` → matmuls."""
