"""Causal attention in one document after the other: PyTorch's varlen_attn, with the active flash implementation.

Importing this loads the whole of torch.compile, which takes seconds: import it only where there are documents.

Legend: B batch, H query heads, G key-value heads, S sequence, K head width, T = B·S tokens.
"""

from inspect import signature
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

_GROUPING: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""Arguments for grouped queries: torch 2.11 groups them without being told, later versions must be told."""
_WIDTH = 8
"""Flash kernels want K to be a multiple of this; SDPA pads K itself."""


def attend_by_document(q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, offsets: Tensor) -> Tensor:
    """`causal_attention` inside each document, [B, H, S, K]; `offsets` come from `documents.list_offsets`."""
    batch, _, seq_len, width = q_BHSK.shape
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHSK, k_BGSK, v_BGSK))
    if width % _WIDTH:  # only then, since padding copies
        rows = (F.pad(x, (0, -width % _WIDTH)) for x in rows)
    q_THK, k_TGK, v_TGK = (x.contiguous() for x in rows)
    out_THK = varlen_attn(
        q_THK, k_TGK, v_TGK, offsets, offsets, seq_len, seq_len,
        scale=width**-0.5, window_size=(-1, 0), **_GROUPING,
    )  # fmt: skip
    assert isinstance(out_THK, Tensor), "it gives more only if it is asked to"
    return out_THK[..., :width].unflatten(0, (batch, seq_len)).transpose(1, 2)
