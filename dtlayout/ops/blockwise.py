"""Causal attention as batched matmuls over a few rows of scores at a time (arXiv:2112.05682), for CPUs.

On a CPU these are as fast as any matmul, matrix units included; PyTorch's own flash kernel is not. At a time there are
no more scores than a core's cache holds. None are kept for backward, which computes them again.

Legend: B batch, H query heads, G key-value heads, R = H / G, S sequence, K head width, C positions of a chunk, X = R·C,
N the positions that it sees.
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

_CHUNK_BYTES = 256
"""Bytes that a chunk's scores of one key take: 64 queries in fp32."""
_SCORES_BYTES = 1 << 20
"""Bytes of the scores that exist at a time, unless those of one key-value head need more."""


def blockwise_attention(q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None = None) -> Tensor:
    """`attention.causal_attention`; `mask` is added to the scores: [B, 1, S, S], causality included."""
    return _attend(q_BHSK, k_BGSK, v_BGSK, mask)


# Operators, so that torch.compile does not unroll their loops, and recomputation can keep a result by its name.
@torch.library.custom_op("dtlayout::blockwise_attention", mutates_args=())
def _attend(q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None) -> Tensor:
    out_BHSK = torch.empty_like(q_BHSK)
    q_BGRSK, out_BGRSK = (_grouped(t, k_BGSK) for t in (q_BHSK, out_BHSK))
    for heads, chunk in _chunks(q_BGRSK):
        k_GNK, v_GNK = (t[heads][:, : chunk.stop] for t in (k_BGSK, v_BGSK))
        _, weights_GXN = _weigh(q_BGRSK[heads][:, :, chunk], k_GNK, mask, heads[0], chunk)
        out_GRCK = out_BGRSK[heads][:, :, chunk]
        out_GRCK.copy_(torch.bmm(weights_GXN, v_GNK).view(out_GRCK.shape))
    return out_BHSK


@torch.library.custom_op("dtlayout::blockwise_attention_backward", mutates_args=())
def _differentiate(
    upstream_BHSK: Tensor, q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    exact = torch.promote_types(q_BHSK.dtype, torch.float32)  # dtype of sums over chunks
    dq_BHSK = torch.empty_like(q_BHSK)
    dk_BGSK, dv_BGSK = (torch.zeros_like(t, dtype=exact) for t in (k_BGSK, v_BGSK))
    q_BGRSK, dq_BGRSK, upstream_BGRSK = (_grouped(t, k_BGSK) for t in (q_BHSK, dq_BHSK, upstream_BHSK))
    for heads, chunk in _chunks(q_BGRSK):
        k_GNK, v_GNK, dk_GNK, dv_GNK = (t[heads][:, : chunk.stop] for t in (k_BGSK, v_BGSK, dk_BGSK, dv_BGSK))
        q_GXK, weights_GXN = _weigh(q_BGRSK[heads][:, :, chunk], k_GNK, mask, heads[0], chunk)
        upstream_GXK = upstream_BGRSK[heads][:, :, chunk].flatten(1, 2)
        dv_GNK += torch.bmm(weights_GXN.mT, upstream_GXK)
        d_weights = torch.bmm(upstream_GXK, v_GNK.mT)
        d_scores_GXN = torch._softmax_backward_data(d_weights, weights_GXN, -1, d_weights.dtype)
        dk_GNK += torch.bmm(d_scores_GXN.mT, q_GXK)
        dq_GRCK = dq_BGRSK[heads][:, :, chunk]
        dq_GRCK.copy_(torch.bmm(d_scores_GXN, k_GNK).mul_(_scale(q_BHSK)).view(dq_GRCK.shape))
    return dq_BHSK, dk_BGSK.to(q_BHSK.dtype), dv_BGSK.to(q_BHSK.dtype)


@_attend.register_fake
def _(q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None) -> Tensor:
    return torch.empty_like(q_BHSK)


@_differentiate.register_fake
def _(upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    return *_differentiate(upstream, *ctx.saved_tensors), None


_attend.register_autograd(_backward, setup_context=_keep_inputs)


def _weigh(q_GRCK: Tensor, k_GNK: Tensor, mask: Tensor | None, sample: int, chunk: slice) -> tuple[Tensor, Tensor]:
    """The scaled queries of a chunk, [G, X, K], and the softmax of their scores, [G, X, N]."""
    scaled = q_GRCK.flatten(1, 2) * _scale(q_GRCK)
    scores = torch.bmm(scaled, k_GNK.mT)
    scores_GRCN = scores.view(*q_GRCK.shape[:3], -1)
    if mask is None:
        size = q_GRCK.shape[2]
        scores_GRCN[..., chunk] += scores.new_full((size, size), -math.inf).triu_(1)
    else:
        scores_GRCN += mask[sample, :, chunk, : chunk.stop]
    return scaled, torch.softmax(scores, -1, out=scores)


def _chunks(q_BGRSK: Tensor) -> Iterator[tuple[tuple[int, slice], slice]]:
    """(sample, slice of its key-value heads), slice of positions: together all parts of the work."""
    num_samples, num_kv_heads, repeats, seq_len, _ = q_BGRSK.shape
    length = _CHUNK_BYTES // q_BGRSK.element_size()
    at_once = max(1, _SCORES_BYTES // (_CHUNK_BYTES * repeats * seq_len))
    for sample, head in product(range(num_samples), range(0, num_kv_heads, at_once)):
        for first in range(0, seq_len, length):
            yield (sample, slice(head, head + at_once)), slice(first, min(first + length, seq_len))


def _grouped(x_BHSK: Tensor, k_BGSK: Tensor) -> Tensor:
    """Queries [B, G, R, S, K]: for each key-value head the query heads that it serves."""
    return x_BHSK.unflatten(1, (k_BGSK.shape[1], -1))


def _scale(q: Tensor) -> float:
    return float(q.shape[-1] ** -0.5)
