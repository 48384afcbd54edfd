"""Attention of some queries to some keys, and the log-sum-exp of scores that joins it to attention to other keys.

Suppose that softmax(q·kᵀ)·v over all keys is wanted, and only some keys are here. Then the part's result and the
logarithm L of the sum of its exponentials are enough: two parts (o, L) and (o', L') join to L'' = log(e^L + e^L') and
o'' = e^(L - L'')·o + e^(L' - L'')·o' (arXiv:2112.05682, sec. 2; flash kernels do the same inside). Backward of a part
needs only the joined o and L: the weights are e^(score - L), as if all keys were here.

Legend: B batch, H query heads, G key-value heads, R = H / G, X = R·S, S queries, N keys, K head width.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

KernelForward = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
Slices = tuple[slice, slice]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, ...]]
_CHUNK_BYTES = 256
"""Bytes of a chunk's scores of one key, where they are computed in chunks: 64 queries in fp32."""
_SCORES_BYTES = 1 << 20
"""Bytes of a chunk's scores, unless those of one key-value head need more."""
_WIDTH = 8
"""Flash kernels on CUDA want K to be a multiple of this."""


class Partial(NamedTuple):
    """Forward and backward of a kernel that attends to a part of the keys."""

    forward: KernelForward
    """q [B, H, S, K], k and v [B, G, N, K], and whether a query sees no later key (then S = N) → the result [B, H, S,
    K] and the log-sum-exp [B, H, S]."""
    backward: Backward
    """Gradient of the joined result, q, k, v, the joined result and log-sum-exp, and whether it is causal → this part's
    terms of the gradients of q, k and v."""


def join(out: Tensor, sums: Tensor, other_out: Tensor, other_sums: Tensor) -> None:
    """Add a part to earlier ones, in place.

    `out` and `sums` are fp32 or finer, 0 and -inf where nothing was seen yet.
    """
    joined = torch.logaddexp(sums, other_sums)
    out.mul_((sums - joined).exp_().unsqueeze(-1)).add_(other_out * (other_sums - joined).exp_().unsqueeze(-1))
    sums.copy_(joined)


def _score_forward(
    q_BHSK: Tensor, k_BGNK: Tensor, v_BGNK: Tensor, is_causal: bool, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Attention with all scores at once; `first` is the number of own keys before the first query."""
    weights_BGXN = _score(q_BHSK, k_BGNK, is_causal, first)
    sums_BGX = weights_BGXN.logsumexp(-1)
    weights_BGXN.sub_(sums_BGX.unsqueeze(-1)).exp_()
    out_BGXK = weights_BGXN.to(v_BGNK.dtype) @ v_BGNK
    return out_BGXK.view(q_BHSK.shape), sums_BGX.view(q_BHSK.shape[:3])


def _score_backward(
    upstream: Tensor,
    q_BHSK: Tensor,
    k_BGNK: Tensor,
    v_BGNK: Tensor,
    out: Tensor,
    sums: Tensor,
    is_causal: bool,
    first: int = 0,
) -> tuple[Tensor, ...]:
    upstream_BGXK, out_BGXK, q_BGXK = (_group(t, k_BGNK) for t in (upstream, out, q_BHSK))
    weights_BGXN = _score(q_BHSK, k_BGNK, is_causal, first).sub_(_group(sums.unsqueeze(-1), k_BGNK)).exp_()
    dv_BGNK = weights_BGXN.to(v_BGNK.dtype).mT @ upstream_BGXK
    joint_BGX1 = (upstream_BGXK * out_BGXK).to(sums.dtype).sum(-1, keepdim=True)
    d_scores_BGXN = (upstream_BGXK @ v_BGNK.mT).to(sums.dtype).sub_(joint_BGX1).mul_(weights_BGXN)
    d_scores_BGXN = d_scores_BGXN.mul_(q_BHSK.shape[-1] ** -0.5).to(q_BHSK.dtype)
    return (d_scores_BGXN @ k_BGNK).view(q_BHSK.shape), d_scores_BGXN.mT @ q_BGXK, dv_BGNK


def _score(q_BHSK: Tensor, k_BGNK: Tensor, is_causal: bool, first: int) -> Tensor:
    """Scaled scores [B, G, R·S, N] in fp32 or finer; -inf for later keys if `is_causal`."""
    exact = torch.promote_types(q_BHSK.dtype, torch.float32)
    scores_BGXN = ((_group(q_BHSK, k_BGNK) * q_BHSK.shape[-1] ** -0.5) @ k_BGNK.mT).to(exact)
    scores_BGRSN = scores_BGXN.unflatten(2, (-1, q_BHSK.shape[2]))
    if is_causal:
        scores_BGRSN += scores_BGXN.new_full(scores_BGRSN.shape[-2:], -torch.inf).triu_(first + 1)
    return scores_BGXN


def _group(x_BHSK: Tensor, k_BGNK: Tensor) -> Tensor:
    """Query heads below each other, [B, G, R·S, K], for each key-value head that serves them."""
    return x_BHSK.unflatten(1, (k_BGNK.shape[1], -1)).flatten(2, 3)


# Operators, like the one of ops/blockwise.py: a chunk's scores stay in a cache, and memory trackers need not see them.
@torch.library.custom_op("dtlayout::chunked_part", mutates_args=())
def _chunk_forward(q_BHSK: Tensor, k_BGNK: Tensor, v_BGNK: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q_BHSK, memory_format=torch.contiguous_format)
    sums = out.new_empty(out.shape[:3], dtype=torch.promote_types(out.dtype, torch.float32))
    for queries, keys, chunk in _chunks(q_BHSK, k_BGNK):
        q_part, k_part, v_part = q_BHSK[queries][:, :, chunk], k_BGNK[keys], v_BGNK[keys]
        out[queries][:, :, chunk], sums[queries][:, :, chunk] = _score_forward(
            q_part, k_part, v_part, is_causal, chunk.start
        )
    return out, sums


@torch.library.custom_op("dtlayout::chunked_part_backward", mutates_args=())
def _chunk_backward(
    upstream: Tensor,
    q_BHSK: Tensor,
    k_BGNK: Tensor,
    v_BGNK: Tensor,
    out: Tensor,
    sums: Tensor,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dq = torch.empty_like(q_BHSK, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros(t.shape, dtype=sums.dtype, device=t.device) for t in (k_BGNK, v_BGNK))
    for queries, keys, chunk in _chunks(q_BHSK, k_BGNK):
        own = [x[queries][:, :, chunk] for x in (upstream, q_BHSK, out, sums)]
        dq[queries][:, :, chunk], dk_part, dv_part = _score_backward(
            own[0], own[1], k_BGNK[keys], v_BGNK[keys], own[2], own[3], is_causal, chunk.start
        )
        dk[keys] += dk_part
        dv[keys] += dv_part
    return dq, dk, dv


def _chunks(q_BHSK: Tensor, k_BGNK: Tensor) -> Iterator[tuple[Slices, Slices, slice]]:
    """(sample and query heads), (sample and key-value heads), chunk of queries: slices for all parts of the work."""
    (num_samples, num_heads, num_queries, _), num_kv_heads = q_BHSK.shape, k_BGNK.shape[1]
    repeats, length = num_heads // num_kv_heads, _CHUNK_BYTES // q_BHSK.element_size()
    at_once = max(1, _SCORES_BYTES // (_CHUNK_BYTES * repeats * k_BGNK.shape[2]))
    for sample, head in product(range(num_samples), range(0, num_kv_heads, at_once)):
        here = slice(sample, sample + 1)
        queries, keys = (here, slice(head * repeats, (head + at_once) * repeats)), (here, slice(head, head + at_once))
        for first in range(0, num_queries, length):
            yield queries, keys, slice(first, first + length)


@_chunk_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@_chunk_backward.register_fake
def _(upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    exact = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(k.shape, dtype=exact), q.new_empty(v.shape, dtype=exact)


def _flash_forward(q_BHSK: Tensor, k_BGNK: Tensor, v_BGNK: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    scale = q_BHSK.shape[-1] ** -0.5
    if q_BHSK.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHSK, k_BGNK, v_BGNK, 0.0, is_causal, scale=scale
        )
    q, k, v = (_pad(t) for t in (q_BHSK, k_BGNK, v_BGNK))
    out, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
    return out[..., : q_BHSK.shape[-1]], sums


def _flash_backward(
    upstream: Tensor,
    q_BHSK: Tensor,
    k_BGNK: Tensor,
    v_BGNK: Tensor,
    out: Tensor,
    sums: Tensor,
    is_causal: bool,
) -> tuple[Tensor, ...]:
    scale = q_BHSK.shape[-1] ** -0.5
    if q_BHSK.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            upstream, q_BHSK, k_BGNK, v_BGNK, out, sums, 0.0, is_causal, scale=scale
        )
    padded = [_pad(t) for t in (upstream, q_BHSK, k_BGNK, v_BGNK, out)]
    whole_sums = sums.contiguous()  # kernels read it as one block of memory
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_BHSK.device)
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *padded, whole_sums, None, None, q_BHSK.shape[2], k_BGNK.shape[2], 0.0, is_causal, no_dropout, no_dropout,
        scale=scale,
    )  # fmt: skip
    return tuple(gradient[..., : q_BHSK.shape[-1]] for gradient in gradients)


def _pad(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % _WIDTH)) if x.shape[-1] % _WIDTH else x


SCORES = Partial(_score_forward, _score_backward)
"""Computes all scores of a part at once; runs on any device."""
CHUNKS = Partial(_chunk_forward, _chunk_backward)
"""Computes a few rows of scores at a time, for a CPU's cache; runs on any device."""
FLASH = Partial(_flash_forward, _flash_backward)
"""PyTorch's flash kernels, or the implementation that is active."""
