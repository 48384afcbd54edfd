"""Backwards in two parts: gradients of the inputs of a stage now, those of its linear layers' weights when it has time.

While a stage's weights are put off, the backward of each linear layer makes the gradient of its input alone, and keeps
what those of its weight and bias are made of: its input, and the gradient of its output. So autograd goes through the
stage once, and nothing is computed again for the second part, recomputed blocks included. What is no linear layer (the
norms, the embedding, the head with its loss) has its gradients with the first part.

What is put off is kept beside the graph, of which a compiler would not know; layouts that compile blocks are refused.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from dtlayout.ops.linear import SplittableLinear


class DelayedWeightGradient(NamedTuple):
    """What the gradients of a linear layer's weight [N, D], and of its bias [N], are made of."""

    edges: Sequence[GradientEdge]
    """Where they go in the graph: to the parameters, or to what made this rank's part of them."""
    x: Tensor
    """[…, D]."""
    gradient: Tensor
    """That of the output, […, N]."""

    def make(self) -> list[Tensor]:
        """The gradients."""
        gradient_TN = self.gradient.flatten(0, -2)
        made = [gradient_TN.t() @ self.x.flatten(0, -2), gradient_TN.sum(0)]
        return made[: len(self.edges)]


class StageWeights:
    """The linear layers of a stage, whose weights' gradients can be put off."""

    def __init__(self, stage: nn.Module):
        """They compute what they did before. A linear layer of somebody's own class is left as it is, and never waits.

        `stage` is changed in place.
        """
        self._put_off: list[DelayedWeightGradient] | None = None
        for module in stage.modules():
            if type(module) is nn.Linear:
                module.__class__ = SplittableLinear
            if isinstance(module, SplittableLinear):
                module.multiply = self._multiply

    @contextmanager
    def put_off(self) -> Iterator[list[DelayedWeightGradient]]:
        """Of backwards within this block, the list of what is left to do, for `accumulate`."""
        found: list[DelayedWeightGradient] = []
        self._put_off = found
        try:
            yield found
        finally:
            self._put_off = None

    def gradients(self, work: DelayedWeightGradient) -> Sequence[Tensor | None]:
        """Those of weight and bias, or none now."""
        if self._put_off is None:
            return work.make()
        self._put_off.append(work)
        return [None] * len(work.edges)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not torch.is_grad_enabled():
            return F.linear(x, weight, bias)
        parameters = [weight] if bias is None else [weight, bias]
        edges = [get_gradient_edge(each) for each in parameters]
        output: Tensor = _Linear.apply(self, edges, x, *parameters)
        return output


@torch.no_grad()
def accumulate(put_off: list[DelayedWeightGradient]) -> None:
    """Add what was put off to the gradients of the weights, and empty the list."""
    while put_off:
        _make(put_off.pop())


def _make(work: DelayedWeightGradient) -> None:
    """A parameter takes its gradient, which has its format, as its own: autograd would copy what is held here too.

    Where tp has made this rank's part of a parameter, autograd goes on from there.
    """
    edges, gradients = [], []
    for edge, gradient in zip(work.edges, work.make(), strict=True):
        parameter = getattr(edge.node, "variable", None)  # of the node that ends a graph at a leaf
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
        # As it was saved it would keep the graph behind it, and so the input of the stage and the gradient of that.
        return None, None, of_input, *ctx.stage.gradients(DelayedWeightGradient(ctx.edges, x.detach(), gradients[0]))
