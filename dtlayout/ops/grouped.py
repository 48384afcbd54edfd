"""Matmuls of a mixture's experts: rows that lie together by expert, each times the matrix of its expert.

Where an expert's rows end is known on the device alone, so `grouped` launches one kernel for all experts and waits for
nothing. `loop` reads the ends, and multiplies one expert after the other.

Autograd's own backward of `torch._grouped_mm` refuses gradients that are not contiguous, and keeps what it multiplied.
`multiply_groups` keeps the rows as they came and their scores, and computes their product again.

Legend: R rows, D width of a row, N width of a result, E experts.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_impls import register_op_impl
from torch.autograd import Function

from dtlayout.ops.linear import Delay, make_at_once


class GroupedMatmul(NamedTuple):
    """A kernel of the experts' matmuls, which autograd does not look into."""

    multiply: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Rows [R, D], weights [E, N, D] and ends [E] → [R, N]: each row times its expert's matrix, transposed.

    `ends` are int32, on the device of the rows: the number of rows up to each expert's last. The last one is R.
    """
    input_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Gradient of the result [R, N], weights [E, N, D] and ends [E] → gradient of the rows [R, D]."""
    weight_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Gradient of the result [R, N], rows [R, D] and ends [E] → gradient of the weights [E, N, D], which is 0 where an
    expert has no rows."""


def multiply_groups(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    kernel: GroupedMatmul,
    scores: Tensor | None = None,
    delay: Delay = make_at_once,
) -> Tensor:
    """Each row of x [R, D] times its expert's matrix of weight [E, N, D], transposed → [R, N].

    The first `ends[0]` rows are the first expert's, and so on; `ends` [E] are int32, and the last is R. With `scores`
    [R], in fp32 or finer, a row is multiplied by its score first, and rounded to the format of x. Backward hands
    `delay` how the weight's gradient is made, and takes what it returns: the gradient, or None where it comes later.
    """
    assert x.shape[1:] == weight.shape[2:] and ends.shape == weight.shape[:1], "sizes of rows, weights and ends agree"
    assert ends.dtype == torch.int32 and (scores is None or scores.shape == x.shape[:1])
    output: Tensor = _MultiplyGroups.apply(x, weight, ends, scores, kernel, delay)
    return output


class StackedLinear(nn.Module):
    """A linear layer without bias for each expert, of one weight [E, N, D]; who makes it gives the initial values."""

    multiply: Callable[..., Tensor] = staticmethod(multiply_groups)
    """`multiply_groups`, or a function that computes the same."""

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, kernel: GroupedMatmul, dtype: torch.dtype
    ):
        super().__init__()
        self.kernel = kernel
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features, dtype=dtype))

    def forward(self, x: Tensor, ends: Tensor, scores: Tensor | None = None) -> Tensor:
        """`multiply_groups` with the weight of this layer."""
        return self.multiply(x, self.weight, ends, self.kernel, scores)


class _MultiplyGroups(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        scores: Tensor | None,
        kernel: GroupedMatmul,
        delay: Delay,
    ) -> Tensor:
        of_x, of_weight, _, of_scores, *_ = ctx.needs_input_grad
        ctx.kernel, ctx.delay = kernel, delay
        ctx.save_for_backward(
            x if of_weight or of_scores else None,
            weight if of_x or of_scores else None,
            ends,
            scores if of_x or of_weight or of_scores else None,
        )
        return kernel.multiply(_scaled(x, scores), weight, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends, scores = ctx.saved_tensors
        of_x, of_weight, _, of_scores, *_ = ctx.needs_input_grad
        gradient = in_rows(gradients[0])
        made: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if of_x or of_scores:
            product = ctx.kernel.input_gradient(gradient, weight, ends)  # gradient of the rows times their scores
            made[0] = _scaled(product, scores) if of_x else None
            made[3] = _sum_products(product, x, scores) if of_scores else None
            del product  # which would lie beside the weight's gradient
        if of_weight:
            # Saved as it was, x would keep the graph behind it.
            kept = (x.detach(), None if scores is None else scores.detach())
            made[1] = ctx.delay(partial(_differentiate_weight, ctx.kernel, gradient, *kept, ends))
        return tuple(made)


def _scaled(x: Tensor, scores: Tensor | None) -> Tensor:
    return x if scores is None else (x * scores[:, None]).to(x.dtype)


def _sum_products(left: Tensor, right: Tensor, like: Tensor) -> Tensor:
    """Sum over each row of the products of two tensors [R, D], in fp32 or finer; then in the format of `like`."""
    exact = torch.promote_types(like.dtype, torch.float32)
    return (left.to(exact) * right).sum(-1).to(like.dtype)


def _differentiate_weight(
    kernel: GroupedMatmul, gradient: Tensor, x: Tensor, scores: Tensor | None, ends: Tensor
) -> Tensor:
    return kernel.weight_gradient(gradient, _scaled(x, scores), ends)


def in_rows(x: Tensor) -> Tensor:
    """The tensor [R, D] with one row behind the other.

    torch._grouped_mm refuses other strides, such as those of a gradient that is an expanded sum, also without rows.
    """
    return x if x.stride() == (x.shape[1], 1) else x.clone(memory_format=torch.contiguous_format)


def _multiply_grouped(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Rows [R, K] times matrices [E, K, M] → [R, M], or parts of columns [M, R] times parts of rows [R, K] → [E, M, K].

    So says torch._grouped_mm.
    """
    made = torch._grouped_mm(left, right, offs=ends)
    if right.dim() == 2 and made.device.type == "cuda" and _leaves_garbage(made.device):
        made.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)
    return made


@cache
def _leaves_garbage(device: torch.device) -> bool:
    """Whether the product of no columns and no rows is what its memory held: on Blackwell, pytorch issue 172439."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] >= 10


# An operator, so that torch.compile does not look for the ends, and recomputation can keep a result by its name.
@torch.library.custom_op("dtlayout::grouped_mm", mutates_args=())
def _multiply_in_loop(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """`_multiply_grouped`, one expert after the other."""
    made = make_result(left, right, ends)
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if right.dim() == 2:
            torch.mm(left[:, begin:end], right[begin:end], out=made[expert])
        else:
            torch.mm(left[begin:end], right[expert], out=made[begin:end])
        begin = end
    assert begin == left.shape[right.dim() == 2], f"{begin} rows have an expert, of {list(left.shape)}"
    return made


@_multiply_in_loop.register_fake
def make_result(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Memory for what torch._grouped_mm makes of these."""
    groups = [ends.shape[0]] if right.dim() == 2 else []
    return left.new_empty(*groups, left.shape[0], right.shape[-1])


@register_op_impl(torch.ops.aten._grouped_mm.default)
def _grouped_on_fake(mode: Any, operator: Any, left: Tensor, right: Tensor, offs: Tensor) -> Any:
    """The result in the formats that CPUs compute and torch's own fake of this operator refuses."""
    return NotImplemented if left.dtype == torch.bfloat16 else make_result(left, right, offs)


def _from(operator: Callable[[Tensor, Tensor, Tensor], Tensor]) -> GroupedMatmul:
    """A kernel of an operator that computes what torch._grouped_mm does."""
    return GroupedMatmul(
        lambda x, weight, ends: operator(in_rows(x), weight.mT, ends),
        lambda gradient, weight, ends: operator(in_rows(gradient), weight, ends),
        lambda gradient, x, ends: operator(in_rows(gradient).t(), in_rows(x), ends),
    )


GROUPED = _from(_multiply_grouped)
"""PyTorch's grouped matmul; rows of both widths are a multiple of 16 bytes."""
LOOP = _from(_multiply_in_loop)
"""One matmul after the other."""
