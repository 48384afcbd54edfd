"""Attention by its definition, and inputs for it."""

import math

import torch
from torch import Tensor


def explicit_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition; each key-value head repeated for the query heads that share it."""
    group, seq_len = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future = torch.ones(seq_len, seq_len).triu(1).bool()
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v


STARTS = torch.tensor([[0, 0, 0, 3, 4, 4, 4, 4, 4], [0] * 9], dtype=torch.int32)
"""Documents of 3, 1 and 5 tokens in one sample, and one that is a whole sample."""


def attention_of_each_document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition for STARTS, computed for each document alone."""
    whole = explicit_attention(q, k, v)[1:]
    parts = [explicit_attention(*(t[:1, :, part] for t in (q, k, v))) for part in map(slice, (0, 3, 4), (3, 4, 9))]
    return torch.cat([torch.cat(parts, dim=2), whole])


def make_inputs(kv_heads: int, seq_len: int = 9, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(kv_heads)
    shapes = [(2, 4, seq_len, 8), (2, kv_heads, seq_len, 8), (2, kv_heads, seq_len, 8)]
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]
