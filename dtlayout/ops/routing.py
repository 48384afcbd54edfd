"""Routing: the experts that compute each token, how much each of them counts, and copies of tokens in their order.

Nothing here adds in an order that changes from run to run: copies are made, and results of a token added up, by a
permutation and its inverse, in backward too.

Legend: T tokens, D model width, E experts, G groups of experts, K experts of a token, R = T·K copies of tokens.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtlayout.spec.model_shape import Experts

_TINY = 1e-20
"""Added to a sum of scores before it divides, as DeepSeek-V3 does: all scores of a token may be 0."""


def score(logits_TE: Tensor, rules: Experts) -> Tensor:
    """Scores [T, E] of a router's logits, in fp32 or finer."""
    exact_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    return exact_TE.softmax(-1) if rules.score == "softmax" else exact_TE.sigmoid()


@torch.no_grad()
def choose(scores_TE: Tensor, rules: Experts, correction_E: Tensor | None = None) -> Tensor:
    """Experts [T, K] of each token: those with the highest scores, to which `correction_E` is added.

    With groups a token's experts come from the groups whose two best experts have the highest sum (DeepSeek-V3,
    arXiv:2412.19437, sec. 2.1.2).
    """
    if correction_E is not None:
        scores_TE = scores_TE + correction_E
    if rules.groups > 1:
        by_group_TGE = scores_TE.unflatten(1, (rules.groups, -1))
        sums_TG = by_group_TGE.topk(2, -1).values.sum(-1)
        best_TG = sums_TG.topk(rules.groups_per_token, -1, sorted=False).indices
        is_open_TG = torch.zeros_like(sums_TG, dtype=torch.bool).scatter_(1, best_TG, True)
        scores_TE = by_group_TGE.masked_fill(~is_open_TG.unsqueeze(-1), -torch.inf).flatten(1)
    return scores_TE.topk(rules.per_token, -1).indices


def weigh(scores_TE: Tensor, experts_TK: Tensor, rules: Experts) -> Tensor:
    """Weights [T, K] of the experts of a token, by which their results are multiplied."""
    chosen_TK = scores_TE.gather(1, experts_TK)
    if rules.normalized:
        chosen_TK = share_out(chosen_TK)
    return chosen_TK if rules.scale == 1 else chosen_TK * rules.scale


def share_out(scores: Tensor) -> Tensor:
    """Scores divided by the sum of their row."""
    return scores / (scores.sum(-1, keepdim=True) + _TINY)


class Order(NamedTuple):
    """Order of tokens' copies by expert."""

    order: Tensor
    """Place among the experts of all tokens, t·K + k, of each copy."""
    inverse: Tensor
    """Place of each of these among the copies."""
    ends: Tensor
    """Copies up to and with those of each expert, int32."""
    per_token: int
    """K, the copies of a token."""

    @classmethod
    def by_expert(cls, experts_TK: Tensor, num_experts: int) -> "Order":
        """Copies of the first expert come first; those of an expert are in the order of tokens."""
        sorted_R, order_R = experts_TK.flatten().sort(stable=True)
        numbers_E = torch.arange(num_experts, device=sorted_R.device)
        ends_E = torch.searchsorted(sorted_R, numbers_E, right=True, out_int32=True)
        return cls(order_R, invert(order_R), ends_E, experts_TK.shape[1])

    def copy(self, x_TD: Tensor) -> Tensor:
        """A copy [R, D] of its token for each expert."""
        return _Copy.apply(x_TD, self.order, self.inverse, self.per_token)

    def add_up(self, x_RD: Tensor) -> Tensor:
        """Sum [T, D] of the copies of each token."""
        return _AddUp.apply(x_RD, self.order, self.inverse, self.per_token)

    def sort(self, values_TK: Tensor) -> Tensor:
        """A value for each expert of each token, [R], in the order of copies."""
        return permute(values_TK.flatten(), self.order, self.inverse)


def permute(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Rows of a tensor in another order; its gradient's rows go back by `inverse`."""
    return _Permute.apply(x, order, inverse)


def invert(order: Tensor) -> Tensor:
    """The order that brings rows back."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


# Orders are kept on `ctx` and not saved: what recomputation saves again must not need the way back of tokens.


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_R: Tensor, inverse_R: Tensor, per_token: int) -> Tensor:
        ctx.inverse_R, ctx.per_token = inverse_R, per_token
        return x_TD[order_R // per_token]

    @staticmethod
    def backward(ctx: Any, *gradient_RD: Tensor) -> tuple[Tensor, None, None, None]:
        return _add_copies(gradient_RD[0], ctx.inverse_R, ctx.per_token), None, None, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, order_R: Tensor, inverse_R: Tensor, per_token: int) -> Tensor:
        ctx.order_R, ctx.per_token = order_R, per_token
        return _add_copies(x_RD, inverse_R, per_token)

    @staticmethod
    def backward(ctx: Any, *gradient_TD: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient_TD[0][ctx.order_R // ctx.per_token], None, None, None


def _add_copies(x_RD: Tensor, inverse_R: Tensor, per_token: int) -> Tensor:
    return x_RD[inverse_R].unflatten(0, (-1, per_token)).sum(1)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return x[order]

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[0][ctx.inverse], None, None
