"""Feed-forwards of a block: one that computes every token, or routed experts, each computing the tokens sent to it.

Single-device code. Plans replace `project` of a `FeedForward`, and `dispatch` and `sum_counts` of a `Mixture`'s experts
and router.

Legend: B batch, S sequence, D model width, T = B·S tokens, E experts, K experts of a token, R copies of tokens.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from dtlayout.ops.balance import RoutingCounts, attach_losses
from dtlayout.ops.grouped import GroupedMatmul, StackedLinear
from dtlayout.ops.linear import Project, project
from dtlayout.ops.routing import Order, choose, score, weigh
from dtlayout.spec.kernel_records import ExpertsKernel, SwigluKernel
from dtlayout.spec.kernel_table import find_kernel
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.model_shape import ModelShape

Combine = Callable[[Tensor], Tensor]
"""Results of a rank's experts → the results [R, D] of the copies that it dispatched, in their order."""
Dispatch = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Combine]]
"""(copies [R, D], their scores [R], ends [E]) → copies, scores and ends that the experts of this rank get, and the
combine that belongs to this dispatch."""


class FeedForward(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, shape: ModelShape, kernels: Kernels, dtype: torch.dtype, width: int = 0):
        """`width` is the inner width, by default the model's."""
        super().__init__()
        width = width or shape.ffn_size
        self.swiglu = find_kernel(SwigluKernel, kernels.swiglu).load()
        self.project: Project = project
        self.gate_proj = nn.Linear(shape.hidden_size, width, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(shape.hidden_size, width, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(width, shape.hidden_size, bias=False, dtype=dtype)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(self.swiglu(*self.project(x_BSD, self.gate_proj, self.up_proj)))


class Mixture(nn.Module):
    """Experts, a router that chooses some for each token, and a feed-forward of all tokens where the model has one."""

    def __init__(self, shape: ModelShape, kernels: Kernels, dtype: torch.dtype):
        super().__init__()
        assert shape.experts is not None, "only a block with experts has a mixture"
        self.rules = rules = shape.experts
        self.gate = nn.Linear(shape.hidden_size, rules.number, bias=False, dtype=dtype)
        exact = torch.zeros(rules.number, dtype=torch.promote_types(dtype, torch.float32))  # small steps add up
        self.correction_bias = nn.Parameter(exact, requires_grad=False) if rules.correction_bias else None
        self.experts = StackedFeedForward(shape, kernels, dtype)
        shared = rules.shared_ffn_size
        self.shared_expert = FeedForward(shape, kernels, dtype, shared) if shared else None
        self.counts = RoutingCounts(rules)

    def forward(self, x_BSD: Tensor) -> Tensor:
        # First, so that backward comes to the experts first, whose FSDP unit is gathered for it.
        of_shared = None if self.shared_expert is None else self.shared_expert(x_BSD)
        x_TD = x_BSD.flatten(0, 1)
        logits_TE = self.gate(x_TD)
        scores_TE = score(logits_TE, self.rules)
        experts_TK = choose(scores_TE, self.rules, self.correction_bias)
        order = Order.by_expert(experts_TK, self.rules.number)
        scores_TE = attach_losses(logits_TE, scores_TE, order.ends, self.counts)
        summed_TD = self.experts(x_TD, weigh(scores_TE, experts_TK, self.rules), order)
        return summed_TD.view_as(x_BSD) if of_shared is None else summed_TD.view_as(x_BSD) + of_shared


class StackedFeedForward(nn.Module):
    """The experts of a block: a `FeedForward` each, their weights in stacks."""

    def __init__(self, shape: ModelShape, kernels: Kernels, dtype: torch.dtype):
        super().__init__()
        assert shape.experts is not None, "only a block with experts has a mixture"
        number, width, inner = shape.experts.number, shape.hidden_size, shape.experts.ffn_size
        kernel = cast(GroupedMatmul, find_kernel(ExpertsKernel, kernels.experts).load())
        self.swiglu = find_kernel(SwigluKernel, kernels.swiglu).load()
        self.dispatch: Dispatch = stay
        self.gate_proj = StackedLinear(number, width, inner, kernel, dtype)
        self.up_proj = StackedLinear(number, width, inner, kernel, dtype)
        self.down_proj = StackedLinear(number, inner, width, kernel, dtype)

    def forward(self, x_TD: Tensor, scores_TK: Tensor, order: Order) -> Tensor:
        """Each token's sum [T, D] of its experts' results, weighed by its scores."""
        x_RD, scores_R, ends_E, combine = self.dispatch(order.copy(x_TD), order.sort(scores_TK), order.ends)
        inner_RF = self.swiglu(self.gate_proj(x_RD, ends_E), self.up_proj(x_RD, ends_E))
        return order.add_up(combine(self.down_proj(inner_RF, ends_E, scores_R)))


def stay(x_RD: Tensor, scores_R: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor, Tensor, Combine]:
    """The dispatch where one rank has all experts: nothing is sent."""
    return x_RD, scores_R, ends_E, lambda results: results
