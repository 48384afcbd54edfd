"""Attention of the models of `transformers`, computed by our kernels; `dtlayout` is its name there.

A family of `transformers` that looks its attention up by name calls `attend` with queries, keys and values. Plain
causal attention goes to the kernel of `kernels.attention`, which is the attribute `attend` of the family's attention
module. What kernels don't compute is done in separate operations, by its attribute `attend_otherwise`: windows and
other masks by PyTorch's scaled_dot_product_attention, softcaps and sinks by matmuls. Context parallelism changes both
attributes.

Where documents are kept apart, a block without a mask gets what its kernel needs (`ops.attention.prepare_mask`): a mask
of scores, offsets of documents, or rows of positions. A window's mask is combined with that of documents.

Legend: B batch, H query heads, G key-value heads, S sequence, K head width.
"""

import inspect
import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtlayout.base.errors import InvalidConfig
from dtlayout.ops.attention import bind_attention, repeat_heads
from dtlayout.ops.documents import find_starts, see_documents
from dtlayout.spec.kernel_records import AttentionKernel
from dtlayout.spec.kernel_table import find_kernel

NAME = "dtlayout"
"""Name of this attention in the tables of `transformers`."""

_DIMS_OF_MASK = 4
"""Dimensions of a block's own mask [B, 1, S, S]. What keeps documents apart alone has fewer: a mask [B, S, S], offsets,
or rows of positions."""
_UNUSED = {"position_ids", "cache_position"}
"""Tensors that families hand on to every attention function, and none reads in training."""


@cache
def register() -> None:
    """Enter attention and masks into the tables of `transformers`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


class ScoreRule(NamedTuple):
    """How scores are made and weighed where no kernel does it."""

    scale: float
    """Factor of each product of a query and a key."""
    is_causal: bool = True
    """True if a token sees none that comes later; a mask says that itself."""
    softcap: float | None = None
    """Bound of the scores."""
    sinks: Tensor | None = None
    """A score of each head [H] that stands beside those of tokens."""
    bias: Tensor | None = None
    """Numbers that are added to the scores, [.., S, S]."""


def bind_kernel(block: nn.Module, kernel: str) -> None:
    """Give each attention module of a block its kernel, the value of `kernels.attention`, as attribute `attend`.

    Its attribute `attend_otherwise` is the function of this name.
    """
    for part in block.modules():
        if looks_attention_up(part):
            part.attend = bind_attention(find_kernel(AttentionKernel, kernel))  # type: ignore[assignment]
            part.attend_otherwise = attend_otherwise  # type: ignore[assignment]


def looks_attention_up(module: nn.Module) -> bool:
    """True if a module's forward takes its attention from the tables of `transformers`."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def make_mask(
    *,
    q_length: int,
    kv_length: int,
    local_size: int | None = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """Mask [B, 1, S, S] that is true where a token sees another; None for plain causal attention.

    `attention_mask` is not read: every token is there. A window that reaches over the whole sequence is none.
    """
    from transformers.masking_utils import sdpa_mask

    window = None if local_size is None or local_size >= kv_length else local_size
    return sdpa_mask(q_length=q_length, kv_length=kv_length, local_size=window, **options)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as `transformers` asks for it: of [B, H, S, K] and [B, G, S, K], the result [B, S, H, K].

    `softcap` bounds the scores, `s_aux` [H] are sinks, to which probability goes that no token gets. `indices`
    [B, S, n] are the positions of the n tokens that each token may attend to, beside what the mask says. InvalidConfig
    for a tensor that is none of these arguments, since it would change the result.
    """
    unknown = [name for name, option in options.items() if isinstance(option, Tensor) and name not in _UNUSED]
    if unknown:
        raise InvalidConfig(
            f"{type(module).__name__} attends with {', '.join(unknown)}, which dtlayout's attention does not know"
        )
    width = query.shape[-1]
    scale = width**-0.5 if scaling is None else scaling
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if indices is not None:
        attention_mask = see_chosen(indices, attention_mask, key.shape[2])
    is_of_kernel = attention_mask is None or attention_mask.dim() < _DIMS_OF_MASK
    is_plain = softcap is None and s_aux is None and position_bias is None and causal
    if attention_mask is not None and attention_mask.dim() == _DIMS_OF_MASK - 1:
        attention_mask = attention_mask.unsqueeze(1)
    if is_of_kernel and is_plain and value.shape[-1] == width:
        factor = scale * math.sqrt(width)  # kernels divide by the root of the width
        query = query if math.isclose(factor, 1, rel_tol=1e-12) else query * factor
        y_BHSK = module.attend(query, key, value, attention_mask)  # type: ignore[operator]
    else:
        asked = ScoreRule(scale, causal, softcap, s_aux, position_bias)
        y_BHSK = module.attend_otherwise(query, key, value, attention_mask, asked)  # type: ignore[operator]
    return y_BHSK.transpose(1, 2).contiguous(), None


def see_chosen(indices: Tensor, mask: Tensor | None, num_keys: int) -> Tensor:
    """Mask [B, 1, S, `num_keys`], true where a token is among those at `indices` [B, S, n] and `mask` lets it be seen.

    Without a mask a token sees none that comes later. InvalidConfig for a mask of numbers, or of a kernel.
    """
    chosen = torch.zeros((*indices.shape[:2], num_keys), dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True).unsqueeze(1)
    if mask is None:
        return chosen.tril()
    if mask.dtype != torch.bool or mask.dim() != _DIMS_OF_MASK:
        raise InvalidConfig("attention to chosen tokens takes a mask that says which tokens each one sees")
    return chosen & mask


def attend_otherwise(q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None, asked: ScoreRule) -> Tensor:
    """Attention that no kernel computes, [B, H, S, K]; of documents' offsets it makes a mask."""
    if mask is not None and mask.dim() < _DIMS_OF_MASK:
        mask = see_documents(find_starts(mask, q_BHSK.shape[0], q_BHSK.shape[2]))
    if asked.softcap is not None or asked.sinks is not None or asked.bias is not None:
        return _attend_by_matmuls(q_BHSK, k_BGSK, v_BGSK, mask, asked)
    num_heads = q_BHSK.shape[1]
    return F.scaled_dot_product_attention(
        q_BHSK, repeat_heads(k_BGSK, num_heads), repeat_heads(v_BGSK, num_heads), attn_mask=mask,
        is_causal=asked.is_causal and mask is None, scale=asked.scale,
    )  # fmt: skip


def _attend_by_matmuls(q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None, asked: ScoreRule) -> Tensor:
    """Attention with scores in memory, in fp32 or finer: softcap, then bias and mask, then sinks beside the tokens."""
    num_heads, seq_len = q_BHSK.shape[1:3]
    scale, is_causal, softcap, sinks_H, bias = asked
    scores = q_BHSK @ repeat_heads(k_BGSK, num_heads).transpose(-1, -2) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if bias is not None:
        scores = scores + bias
    if mask is None and is_causal:
        mask = torch.ones(seq_len, scores.shape[-1], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if sinks_H is not None:
        sinks = sinks_H.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    shares = scores.softmax(dim=-1)[..., : k_BGSK.shape[2]].to(v_BGSK.dtype)
    return shares @ repeat_heads(v_BGSK, num_heads)
