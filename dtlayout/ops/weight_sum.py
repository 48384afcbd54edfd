"""Gradients of weights that their own matmul adds to the sum over microbatches.

Autograd makes the gradient of each microbatch by itself, in the format of the weight. FSDP2 then adds it to a sum in
the reduce format. That pass reads and writes 10 bytes for each parameter: the gradient of 16 bits, and the sum of 32
twice. A matmul can add its product to what is there, so that only the sum is read and written. Nothing is rounded
between the product and the sum.

Autograd sees the weight detached, and no gradient of it. What holds the sum is told by whoever owns it, see
plans/weight_sums.py.

[Note: one number for the compiler]
A compiler drops an operator whose result nobody reads, and compiles a block anew for a number of its own. So the owner
of a sum is told by a tensor without dimensions, which torch.compile hands on as an input. It asks for a gradient, so
that backward has a result, which is 0.

Legend: T tokens, D inputs, N outputs.
"""

from functools import cache
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from dtlayout.ops.linear import Delay, make_at_once


class SumOwner(Protocol):
    """Holder of the sum of a weight's gradients."""

    def add(self, gradient_TN: Tensor, x_TD: Tensor) -> None:
        """Add the product of these to the gradient of the weight [N, D]."""


_OWNERS = WeakValueDictionary[int, SumOwner]()
_NUMBERS = count()


class WeightSum:
    """The sum of a linear layer's weight gradients; `multiply` computes the layer."""

    def __init__(self, owner: SumOwner):
        """`owner` is told each product."""
        self.owner = owner
        self.number = torch.tensor(float(number := next(_NUMBERS)), requires_grad=True)
        """Number of the owner, [Note: one number for the compiler]."""
        _OWNERS[number] = owner

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, delay: Delay = make_at_once) -> Tensor:
        """x·wᵀ + b […, N] of x […, D], weight [N, D] and bias [N].

        Backward hands `delay` how the weight's gradient is made and added, which gives None.
        """
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return F.linear(x, weight, bias)
        if torch.compiler.is_compiling():
            output: Tensor = _CompiledLinear.apply(x, weight.detach(), bias, self.number)
        else:
            output = _SummedLinear.apply(x, weight.detach(), bias, self.number, self.owner, delay)
        return output


class _SummedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, owner: SumOwner, delay: Delay
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.owner, ctx.delay = owner, delay
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (gradient,), owner = gradients, ctx.owner
        # Saved as it was, x would keep the graph behind it.
        gradient_TN, x_TD = gradient.flatten(0, -2), x.detach().flatten(0, -2)

        def make() -> None:
            owner.add(gradient_TN, x_TD)

        of_others = _differentiate_others(ctx, gradient, weight)
        ctx.delay(make)
        return *of_others, None, None, None


class _CompiledLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, number)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, number = ctx.saved_tensors
        (gradient,) = gradients
        of_others = _differentiate_others(ctx, gradient, weight)
        return *of_others, _add_to_owner(gradient.flatten(0, -2), x.flatten(0, -2), number)


def _differentiate_others(ctx: Any, gradient: Tensor, weight: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
    """Gradients of input, weight and bias, in which the weight has none: its sum takes it."""
    of_input = gradient @ weight if ctx.needs_input_grad[0] else None
    of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
    return of_input, None, of_bias


@torch.library.custom_op("dtlayout::add_to_owner", mutates_args=())
def _add_to_owner(gradient_TN: Tensor, x_TD: Tensor, number: Tensor) -> Tensor:
    """Tell the owner with this number of a product; the result is 0."""
    _OWNERS[int(number)].add(gradient_TN, x_TD)
    return torch.zeros_like(number)


@_add_to_owner.register_fake
def _(gradient_TN: Tensor, x_TD: Tensor, number: Tensor) -> Tensor:
    return torch.empty_like(number)


def add_product(total: Tensor, left: Tensor, right: Tensor, *, begins: bool) -> None:
    """Add left · right, of one format, to `total` in place; with `begins` write it over what `total` held.

    What is not rounded between the two is `total`'s own format, where the device has such a matmul.
    """
    if total.dtype != left.dtype:
        torch.ops.dtlayout.add_product(total, left, right, begins)
    elif begins:
        torch.mm(left, right, out=total)
    else:
        total.addmm_(left, right)


# An operator, so that what it makes on a device without such a matmul is nothing that a dry run counts.
@torch.library.custom_op("dtlayout::add_product", mutates_args=("total",))
def _add_product(total: Tensor, left: Tensor, right: Tensor, begins: bool) -> None:
    if adds_finer(total.device.type, left.dtype, total.dtype):
        _add_finer(total, left, right, begins=begins)
    elif begins:
        total.copy_(left @ right)
    else:
        total += left @ right


@_add_product.register_fake
def _(total: Tensor, left: Tensor, right: Tensor, begins: bool) -> None:
    return None


@cache
def adds_finer(device_type: str, fmt: torch.dtype, total: torch.dtype) -> bool:
    """True if torch's matmul of such tensors adds to a sum of another format on this device: tried once, and right."""
    if device_type != "cuda":
        return False
    # Products of up to 16 · 60²: whole numbers in fp32, too large for bf16 and fp16 to hold them all.
    left = torch.arange(256, device=device_type, dtype=torch.float32).view(16, 16).remainder(61).to(fmt)
    found = torch.ones(16, 16, device=device_type, dtype=total)
    try:
        _add_finer(found, left.t(), left, begins=False)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool(torch.equal(found, (left.t().float() @ left.float() + 1).to(total)))


def _add_finer(total: Tensor, left: Tensor, right: Tensor, *, begins: bool) -> None:
    if begins:
        torch.mm(left, right, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
