"""Balance among experts: losses that are added to the gradient inside a block, and counts of tokens.

Losses of routers never leave their block: as in Megatron-LM their gradients join those of the scores and logits, so
that a stage hands on hidden states alone. A step's main loss is the sum over tokens divided by the number of targets in
the global batch. These losses are sums over tokens, divided by the same number.

Legend: T tokens, E experts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dtlayout.ops.routing import share_out
from dtlayout.spec.model_shape import Experts


class RoutingCounts:
    """Counts of a router over the forwards of a step, and the number of targets that divides its losses."""

    def __init__(self, rules: Experts):
        self.rules = rules
        self.num_targets: Tensor | float = 1.0
        """Targets in the global batch of the step."""
        self.sum_counts: Callable[[Tensor], Tensor] = lambda counts: counts
        """Sum over the ranks that have other tokens of the same microbatch; a plan replaces it."""
        self.numbers: Tensor | None = None
        """Sums over the tokens of a step, fp64 [E + 2]: copies for each expert, square of the log-sum-exp, entropy of
        the scores."""

    def add(self, counts_E: Tensor, squares: Tensor, entropy: Tensor) -> None:
        """Add a microbatch."""
        numbers = torch.cat([counts_E.to(torch.float64), torch.stack([squares, entropy]).to(torch.float64)])
        self.numbers = numbers if self.numbers is None else self.numbers + numbers

    def take(self) -> Tensor | None:
        """The numbers since the last call, None without a forward."""
        numbers, self.numbers = self.numbers, None
        return numbers


def attach_losses(logits_TE: Tensor, scores_TE: Tensor, ends_E: Tensor, counts: RoutingCounts) -> Tensor:
    """The scores, to whose gradient those of the router's losses are added; counts the tokens of a training forward.

    Balance loss: for each block coefficient · E · Σ f·P over the experts, f the fraction of a microbatch's copies and P
    the mean share of an expert in the scores, over all tokens of the microbatch (Switch Transformer, arXiv:2101.03961,
    eq. 4). Its factor of the coefficient is 1 where all is even. transformers has the experts of a token in it as a
    factor, and one mean over all blocks. z loss: coefficient · mean square of the log-sum-exp of logits
    (arXiv:2202.08906, eq. 5). Both are means over the targets of the global batch, of sums over all tokens: the fewer
    tokens are targets, the more they weigh beside the main loss of a target.
    """
    if not torch.is_grad_enabled():
        return scores_TE
    rules = counts.rules
    copies_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    log_sums_T = logits_TE.to(scores_TE.dtype).logsumexp(-1)
    shares_TE = scores_TE if rules.score == "softmax" else share_out(scores_TE)
    if not is_recomputing():
        with torch.no_grad():
            squares, entropy = log_sums_T.square().sum(), torch.special.entr(shares_TE).sum()
            counts.add(copies_E, squares, entropy)
    loss = torch.zeros((), dtype=scores_TE.dtype, device=scores_TE.device)
    if rules.balance_loss:
        of_all_E = counts.sum_counts(copies_E.to(scores_TE.dtype))
        loss = loss + rules.balance_loss * rules.number * (of_all_E / of_all_E.sum() * shares_TE).sum()
    if rules.z_loss:
        loss = loss + rules.z_loss * log_sums_T.square().sum()
    if not (rules.balance_loss or rules.z_loss):
        return scores_TE
    return _Attach.apply(scores_TE, loss / counts.num_targets)


def is_recomputing() -> bool:
    """Whether a forward runs inside of a backward, which computes it again."""
    return torch._C._current_graph_task_id() != -1


class _Attach(torch.autograd.Function):
    """Hands `x` on; in backward the loss gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.like
        return gradient[0], torch.ones((), dtype=dtype, device=device)
