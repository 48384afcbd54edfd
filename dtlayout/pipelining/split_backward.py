"""Backwards in two parts: gradients of a stage's inputs now, gradients of its linear layers' weights later.

While the weights of a stage are put off, the backward of each linear layer, experts' too, makes only the gradient of
its input. It keeps the tensors from which the gradients of its weight and bias are made: its input, and the gradient of
its output. So autograd goes through the stage once, and no matmul runs again for the second part, recomputed blocks
included. All other modules (the norms, the embedding, the head with its loss) make their gradients in the first part.

The tensors that are put off lie outside the graph, and a compiler would not know of them; layouts that compile blocks
are refused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from dtlayout.ops.grouped import GroupedMatmul, StackedLinear, multiply_groups
from dtlayout.ops.linear import Delay, SplittableLinear


class DelayedWeightGradient(NamedTuple):
    """The gradients of a linear layer's weight, and of its bias where it has one, before they are made."""

    edges: Sequence[GradientEdge]
    """Places in the graph that take the gradients: parameters, or the operators that made this rank's part."""
    make: Callable[[], Sequence[Tensor | None]]
    """A function that makes a gradient for each edge, or adds it itself and gives None; it holds what this takes."""


class StageWeights:
    """The linear layers of a stage, whose weights' gradients can be put off."""

    def __init__(self, stage: nn.Module):
        """Changes the linear layers of `stage` in place; they compute the same as before.

        A linear layer of a class of its own is left as it is, and its weights are never put off.
        """
        self._put_off: list[DelayedWeightGradient] | None = None
        for module in stage.modules():
            if type(module) is nn.Linear:
                module.__class__ = SplittableLinear
            if isinstance(module, SplittableLinear) and module.weight.requires_grad:  # a frozen one puts nothing off
                is_plain = module.multiply is F.linear
                module.multiply = self._multiply if is_plain else partial(self._multiply_by, module.multiply)
            if isinstance(module, StackedLinear):
                module.multiply = self._multiply_groups

    @contextmanager
    def put_off(self) -> Iterator[list[DelayedWeightGradient]]:
        """While this context is open, backwards put their weights' gradients off; the list is for `accumulate`."""
        found: list[DelayedWeightGradient] = []
        self._put_off = found
        try:
            yield found
        finally:
            self._put_off = None

    def gradients(self, work: DelayedWeightGradient) -> Sequence[Tensor | None]:
        """Gradients of weight and bias; None for each while they are put off."""
        if self._put_off is None:
            return work.make()
        self._put_off.append(work)
        return [None] * len(work.edges)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not torch.is_grad_enabled():
            return F.linear(x, weight, bias)
        parameters = [weight] if bias is None else [weight, bias]
        edges = [get_gradient_edge(each) for each in parameters if each.requires_grad]
        output: Tensor = _Linear.apply(self, edges, x, *parameters)
        return output

    def _multiply_by(
        self, multiply: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """By a function that hands on how the weight's gradient is made; that of the bias is made at once."""
        if not torch.is_grad_enabled():
            return multiply(x, weight, bias)
        return multiply(x, weight, bias, self._delay(weight))

    def _delay(self, weight: Tensor) -> Delay:
        """A function that puts off the gradient of this weight, or makes it."""
        edges = [get_gradient_edge(weight)]
        return lambda make: self.gradients(DelayedWeightGradient(edges, lambda: [make()]))[0]

    def _multiply_groups(
        self, x: Tensor, weight: Tensor, ends: Tensor, kernel: GroupedMatmul, scores: Tensor | None = None
    ) -> Tensor:
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return multiply_groups(x, weight, ends, kernel, scores)
        return multiply_groups(x, weight, ends, kernel, scores, self._delay(weight))


@torch.no_grad()
def accumulate(put_off: list[DelayedWeightGradient]) -> None:
    """Add the gradients that were put off to those of the weights, and empty the list."""
    while put_off:
        _make(put_off.pop())


def _make(work: DelayedWeightGradient) -> None:
    """Add one layer's gradients to its parameters. A parameter without a gradient takes the tensor itself, not a copy.

    autograd would copy a tensor that is still referenced here. Where tp has made this rank's part of a parameter,
    autograd goes on from there.
    """
    edges, gradients = [], []
    for edge, gradient in zip(work.edges, work.make(), strict=True):
        if gradient is None:  # it has been added already
            continue
        parameter = getattr(edge.node, "variable", None)  # the node that ends a graph at a leaf has its parameter
        if parameter is None:
            edges.append(edge)
            gradients.append(gradient)
            continue
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient
        for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):  # as autograd would
            hook(parameter)
    if edges:
        torch.autograd.backward(edges, gradients)


def _differentiate(gradient: Tensor, x: Tensor, has_bias: bool) -> list[Tensor]:
    """Gradient of the weight [N, D] and, where the layer has one, of the bias [N]; of the output […, N], x […, D]."""
    gradient_TN = gradient.flatten(0, -2)
    of_weight = gradient_TN.t() @ x.flatten(0, -2)
    return [of_weight, gradient_TN.sum(0)] if has_bias else [of_weight]


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, stage: StageWeights, edges: Sequence[GradientEdge], x: Tensor, weight: Tensor, *bias: Tensor
    ) -> Tensor:
        ctx.stage, ctx.edges = stage, edges
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, *bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_input = gradients[0] @ weight if ctx.needs_input_grad[2] else None
        # Saved as it was, x would keep the graph behind it, and so the stage's input and the gradient of that.
        make = partial(_differentiate, gradients[0], x.detach(), has_bias=len(ctx.edges) > 1)
        made = ctx.stage.gradients(DelayedWeightGradient(ctx.edges, make))
        frozen = [None] * (len(ctx.needs_input_grad) - 3 - len(made))  # a bias, which comes after its weight
        return None, None, of_input, *made, *frozen
