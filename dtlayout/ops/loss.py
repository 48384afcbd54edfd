"""Cross-entropy as a sum over valid tokens, so that the caller can divide by the tokens of the global batch.

All kernels work alike: forward computes the gradient of the logits together with the loss, and keeps it in the logits'
format; backward only scales it. So neither fp32 logits nor their softmax wait for a backward, and tokens can be taken
chunk by chunk (cf. arXiv:2410.10989, sec. 3.2). Where a rank holds only some of the vocabulary's columns
(arXiv:1909.08053, sec. 3), two small all-reduces join the ranks' sums and targets, and no rank sees all logits.

Legend: B batch, S sequence, T tokens, D model width, V the columns of the vocabulary that are here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtlayout.base.errors import KernelError
from dtlayout.spec.batch import IGNORED
from dtlayout.spec.kernel_records import LossKernel
from dtlayout.spec.kernel_table import find_kernel
from dtlayout.spec.kernels import count_loss_chunks


class Columns:
    """The columns of the vocabulary on this rank: all of them. Tensor parallelism puts another class in its place."""

    def __init__(self, num_unused: int = 0):
        self.num_unused = num_unused
        """Last rows of the weight that are no tokens, and make no columns."""

    def local(self, weight: Tensor) -> Tensor:
        """Rows of the head's weight that make these columns."""
        return weight[: weight.shape[0] - self.num_unused] if self.num_unused else weight

    @property
    def num_missing(self) -> int:
        """Rows of this rank's weight that `local` leaves out."""
        return self.num_unused

    def locate(self, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        """Index of each target among these columns, 0 where it is not one of them, and whether it is one."""
        is_here_T = targets_T != IGNORED
        return targets_T.masked_fill(~is_here_T, 0), is_here_T

    def join(self, log_sums_T: Tensor, wanted_T: Tensor) -> tuple[Tensor, Tensor]:
        """log Σ exp over all ranks' columns, from that over these; the target's logit, from the rank that has it."""
        return log_sums_T, wanted_T


TokenLosses = Callable[[Tensor, Tensor, Columns, Tensor | float, Tensor], Tensor]


def token_losses(
    logits_TV: Tensor, targets_T: Tensor, columns: Columns, scale: Tensor | float, gradient_TV: Tensor
) -> Tensor:
    """-log p(target) · scale of each token, 0 where the target is IGNORED, [T] in fp32 or finer.

    The gradient goes to `gradient_TV`. It is scaled before it is rounded, since a rounded scale would be off in the
    same direction everywhere.
    """
    exact = torch.promote_types(logits_TV.dtype, torch.float32)
    largest_T = logits_TV.amax(dim=1).to(exact)
    exponentials_TV = (logits_TV - largest_T[:, None]).exp_()  # exact, since the largest ones are
    sums_T = exponentials_TV.sum(dim=1)
    log_sums_T = largest_T + sums_T.log()
    index_T, is_here_T = columns.locate(targets_T)
    wanted_T = logits_TV.gather(1, index_T[:, None]).squeeze(1).to(exact) * is_here_T
    joint_T, wanted_T = columns.join(log_sums_T, wanted_T)
    is_valid_T = targets_T != IGNORED
    scale_T = is_valid_T.to(exact) * scale
    weight_T = (log_sums_T - joint_T).exp() / sums_T * scale_T
    torch.mul(exponentials_TV, weight_T[:, None], out=gradient_TV)
    # The target's own gradient is p - 1: p is rounded after the difference, since a p close to 1 would leave nothing.
    own_T = exponentials_TV.gather(1, index_T[:, None]).squeeze(1) * weight_T - is_here_T * scale_T
    gradient_TV.scatter_(1, index_T[:, None], own_T[:, None].to(gradient_TV.dtype))
    return (joint_T - wanted_T) * scale_T


class Head(nn.Linear):
    """Turns hidden states into logits [B, S, V], or into the loss where targets are given.

    Logits are x = (s·h)·wᵀ + b with a factor s, or c·tanh(x/c) with a softcap c (Gemma 2, arXiv:2408.00118).
    """

    product: Callable[..., Tensor] = staticmethod(F.linear)
    """`F.linear`, or a function with its arguments that computes the same."""

    def __init__(
        self,
        width: int,
        vocab_size: int,
        kernel: str,
        dtype: torch.dtype,
        *,
        bias: bool = False,
        factor: float = 1.0,
        softcap: float = 0.0,
    ):
        """`kernel` is a value of `kernels.loss`; a `softcap` of 0 is none."""
        super().__init__(width, vocab_size, bias=bias, dtype=dtype)
        self.function = find_kernel(LossKernel, kernel).load()
        if (bias or softcap) and self.function not in (eager_loss, chunked_loss, linear_loss):
            raise KernelError(
                f"kernels.loss={kernel} computes logits without bias and softcap, of which this model has one; use "
                f"kernels.loss=linear"
            )
        self.columns = Columns()
        self.token_losses: TokenLosses = token_losses
        self.factor, self.softcap = factor, softcap

    def forward(self, h_BSD: Tensor, targets_BS: Tensor | None = None, num_targets: Tensor | float = 1.0) -> Tensor:
        """The logits; with targets the loss, a scalar in fp32 or finer. Logits of unused rows are -inf.

        The loss is the sum of -log p(target) over targets that are not IGNORED, divided by `num_targets`.
        """
        weight_VD = self.columns.local(self.weight)
        h_BSD = h_BSD if self.factor == 1 else h_BSD * self.factor
        if targets_BS is None:
            logits = self.multiply(h_BSD, weight_VD)
            missing = self.columns.num_missing
            return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits
        return self.function(h_BSD.flatten(0, 1), weight_VD, targets_BS.flatten(), self, 1 / num_targets)

    def multiply(self, h_TD: Tensor, weight_VD: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D] that the factor has multiplied."""
        return self.cap(self.product(h_TD, weight_VD, self.local_bias()))

    def local_bias(self) -> Tensor | None:
        """The bias of these columns; None without one."""
        return None if self.bias is None else self.columns.local(self.bias)

    def cap(self, x_TV: Tensor) -> Tensor:
        """Logits between -softcap and softcap; the argument itself without one."""
        return self.softcap * (x_TV / self.softcap).tanh() if self.softcap else x_TV

    def uncap(self, gradient_TV: Tensor, logits_TV: Tensor) -> Tensor:
        """Turn the gradient of logits, in place, into that of what was capped: times 1 - (logits / softcap)²."""
        return gradient_TV.mul_(1 - (logits_TV / self.softcap).square()) if self.softcap else gradient_TV


def eager_loss(h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, head: Head, scale: Tensor | float) -> Tensor:
    """Cross-entropy of all logits at once."""
    return _CrossEntropy.apply(head.multiply(h_TD, weight_VD), targets_T, head, scale, 1)


def chunked_loss(h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, head: Head, scale: Tensor | float) -> Tensor:
    """Cross-entropy of logits that all exist at once; their fp32 softmax is computed chunk by chunk."""
    return _CrossEntropy.apply(head.multiply(h_TD, weight_VD), targets_T, head, scale, count_loss_chunks(len(h_TD)))


def linear_loss(h_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, head: Head, scale: Tensor | float) -> Tensor:
    """Cross-entropy with only one chunk of logits at a time."""
    return _LinearCrossEntropy.apply(h_TD, weight_VD, head.local_bias(), targets_T, head, scale)


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy of given logits; their gradient lies beside them until forward ends."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, targets_T: Tensor, head: Head, scale: Tensor | float, num_chunks: int
    ) -> Tensor:
        gradient_TV = torch.empty_like(logits_TV)
        parts = (logits_TV.chunk(num_chunks), targets_T.chunk(num_chunks), gradient_TV.chunk(num_chunks))
        losses = [head.token_losses(x, y, head.columns, scale, dx).sum() for x, y, dx in zip(*parts, strict=True)]
        ctx.save_for_backward(gradient_TV)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient_TV,) = ctx.saved_tensors
        return gradient_TV.mul_(upstream[0]), None, None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy with the head's matmul; forward leaves the gradients of hidden states, weight and bias.

    Gradients of weight and bias are summed over the chunks in their own format; what is frozen has none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        head: Head,
        scale: Tensor | float,
    ) -> Tensor:
        h_gradient_TD = torch.empty_like(h_TD)
        weight_gradient_VD = torch.zeros_like(weight_VD) if ctx.needs_input_grad[1] else None
        bias_gradient_V = torch.zeros_like(bias_V) if bias_V is not None and ctx.needs_input_grad[2] else None
        num_chunks = count_loss_chunks(len(h_TD))
        losses = []
        parts = (h_TD.chunk(num_chunks), targets_T.chunk(num_chunks), h_gradient_TD.chunk(num_chunks))
        for h, targets, h_gradient in zip(*parts, strict=True):
            logits = head.cap(F.linear(h, weight_VD, bias_V))
            gradient = torch.empty_like(logits)
            losses.append(head.token_losses(logits, targets, head.columns, scale, gradient).sum())
            gradient = head.uncap(gradient, logits)
            torch.mm(gradient, weight_VD, out=h_gradient)
            if weight_gradient_VD is not None:
                weight_gradient_VD.addmm_(gradient.T, h)
            if bias_gradient_V is not None:
                bias_gradient_V += gradient.sum(0)
        ctx.save_for_backward(h_gradient_TD, weight_gradient_VD, bias_gradient_V)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        of_input, *of_parameters = ctx.saved_tensors
        found = (None if gradient is None else gradient.mul_(upstream[0]) for gradient in of_parameters)
        return of_input.mul_(upstream[0]), *found, None, None, None
