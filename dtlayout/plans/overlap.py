"""Async tp: sequence parallelism sends its tensors in pieces, while matmuls work on the pieces that are there.

A branch opens with `gather_while_multiplying`, the all-gather and the matmuls that read its result. It closes with
`multiply_while_scattering`, a matmul and the reduce-scatter of its terms. Each of them has the pattern of the other's
backward.

[Note: two ways to send pieces]
With symmetric memory a rank's kernels read the memory of the others. torch's fused operators copy each rank's part
while matmuls read the parts that have come; selective recomputation computes their matmuls again. Some GPUs of tp do
not see each other's memory, and CPUs don't either. There the sequence is cut into `OVERLAPPED_PIECES`, each with a
collective of its own. All of these begin before the first one is waited for, except on a CPU, where that would gain
nothing.

Legend: B batch, S sequence, t ranks, s = S / t, p a piece's part of s, D model width, N a matmul's outputs on a rank.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed._symmetric_memory  # its operators
from torch import Tensor, nn

from dtlayout.ops.linear import Project
from dtlayout.plans.collectives import Group, begin_gather, begin_scatter, wait
from dtlayout.plans.plan import OVERLAPPED_PIECES


def gather_while_multiplying(x_BsD: Tensor, weights_ND: Sequence[Tensor], group: Group) -> tuple[Tensor, ...]:
    """x·wᵀ [B, S, N] of the whole sequence for each weight; each rank's gradient of x is one term of a sum."""
    return _GatherWhileMultiplying.apply(x_BsD, group, *weights_ND)


def multiply_while_scattering(x_BSN: Tensor, weight_DN: Tensor, group: Group) -> Tensor:
    """This rank's part [B, s, D] of the sum of the ranks' x·wᵀ."""
    return _MultiplyWhileScattering.apply(x_BSN, weight_DN, group)


@cache
def projecting(group: Group, local: Callable[[Tensor], Tensor]) -> Project:
    """`ops.linear.project` for split hidden states; the same function each time, so that torch.compile reuses it."""

    def project(x_BsD: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        results = gather_while_multiplying(x_BsD, [local(linear.weight) for linear in linears], group)
        return tuple(
            y if linear.bias is None else y + local(linear.bias) for y, linear in zip(results, linears, strict=True)
        )

    return project


class _GatherWhileMultiplying(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BsD: Tensor, group: Group, *weights_ND: Tensor) -> tuple[Tensor, ...]:
        x_BSD, results = _gather_and_multiply(x_BsD, [weight.t() for weight in weights_ND], group)
        ctx.group = group
        ctx.save_for_backward(x_BSD if any(ctx.needs_input_grad[2:]) else None, *weights_ND)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients_BSN: Tensor) -> tuple[Tensor | None, ...]:
        x_BSD, *weights_ND = ctx.saved_tensors
        finish = _multiply_and_scatter(gradients_BSN, weights_ND, ctx.group)
        of_weights = [  # they hide the last piece
            _weight_gradient(gradient, x_BSD) if trains else None
            for gradient, trains in zip(gradients_BSN, ctx.needs_input_grad[2:], strict=True)
        ]
        return finish(), None, *of_weights


class _MultiplyWhileScattering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSN: Tensor, weight_DN: Tensor, group: Group) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x_BSN if ctx.needs_input_grad[1] else None, weight_DN)
        return _multiply_and_scatter([x_BSN], [weight_DN.t()], group)()

    @staticmethod
    def backward(ctx: Any, *gradient_BsD: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x_BSN, weight_DN = ctx.saved_tensors
        gradient_BSD, (of_x,) = _gather_and_multiply(gradient_BsD[0], [weight_DN], ctx.group)
        return of_x, _weight_gradient(gradient_BSD, x_BSN) if ctx.needs_input_grad[1] else None, None


def _weight_gradient(gradient_BSN: Tensor, x_BSD: Tensor) -> Tensor:
    return gradient_BSN.flatten(0, 1).t() @ x_BSD.flatten(0, 1)


def _gather_and_multiply(x_BsD: Tensor, matrices_DN: Sequence[Tensor], group: Group) -> tuple[Tensor, list[Tensor]]:
    """The whole sequence [B, S, D], and its products [B, S, N]."""
    if group.shares_memory:
        return torch.ops.symm_mem.fused_all_gather_matmul(x_BsD, [*matrices_DN], 1, group.name)
    pieces_BpD = x_BsD.tensor_split(_count_pieces(x_BsD.shape[1]), 1)
    begun = _begin_all((begin_gather(piece, group) for piece in pieces_BpD), x_BsD.device)
    pieces_tBpD, products = [], []
    for piece, gathered in zip(pieces_BpD, begun, strict=True):
        piece_tBpD = wait(gathered).view(group.size, *piece.shape)
        pieces_tBpD.append(piece_tBpD)
        products.append([piece_tBpD @ matrix_DN for matrix_DN in matrices_DN])
    return _in_order(pieces_tBpD), [_in_order(of_matrix) for of_matrix in zip(*products, strict=True)]


def _multiply_and_scatter(
    inputs_BSN: Sequence[Tensor], matrices_ND: Sequence[Tensor], group: Group
) -> Callable[[], Tensor]:
    """Begin to compute this rank's part [B, s, D] of the sum of the products over inputs and ranks.

    The returned function waits for it.
    """
    if group.shares_memory:
        x_BSN, matrix_ND = _join(inputs_BSN, -1), _join(matrices_ND, 0)
        result_BsD: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x_BSN, matrix_ND, "sum", 1, group.name)
        return lambda: result_BsD
    num_pieces = _count_pieces(inputs_BSN[0].shape[1] // group.size)
    cut = [x_BSN.unflatten(1, (group.size, -1)).tensor_split(num_pieces, 2) for x_BSN in inputs_BSN]

    def multiply(pieces_BtpN: Iterable[Tensor]) -> Tensor:
        first, *others = (piece.transpose(0, 1) @ each for piece, each in zip(pieces_BtpN, matrices_ND, strict=True))
        terms_tBpD: Tensor = sum(others, first)
        return terms_tBpD.flatten(0, 1)

    begun = _begin_all((begin_scatter(multiply(pieces), group) for pieces in zip(*cut, strict=True)), cut[0][0].device)
    return lambda: torch.cat([wait(piece_BpD) for piece_BpD in begun], 1)


def _begin_all(begun: Iterable[Tensor], device: torch.device) -> Iterable[Tensor]:
    """Begin all collectives; on a CPU lazily, one after the other, since gloo sometimes crashes with several."""
    return begun if device.type == "cpu" else [*begun]


def _join(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors], dim)


def _count_pieces(local_seq_len: int) -> int:
    return min(OVERLAPPED_PIECES, local_seq_len)


def _in_order(pieces_tBpN: Sequence[Tensor]) -> Tensor:
    """Pieces joined in the order of tokens, [B, S, N]."""
    return torch.cat([piece.transpose(0, 1) for piece in pieces_tBpN], 2).flatten(1, 2)
