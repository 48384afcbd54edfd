"""Llama on one device: HF's parameter names and RoPE convention, attention through SDPA, no parallelism.

`Llama` → `Decoder` (embedding, blocks, final norm) → `Block` → `Attention`, and `FeedForward` or `Mixture`. A pipeline
stage is a Llama that holds only some of the blocks; blocks keep their index in the whole model, so names are the same
in every layout.

Legend: B batch, S sequence, D model width, H query heads, G key-value heads, K head width, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from dtlayout.models.adapted import attach_adapters
from dtlayout.models.feed_forward import FeedForward, Mixture
from dtlayout.ops.attention import bind_attention, prepare_mask
from dtlayout.ops.documents import Documents
from dtlayout.ops.linear import Project, project
from dtlayout.ops.loss import Head
from dtlayout.ops.norm import RMSNorm
from dtlayout.ops.rope import RotaryEmbedding
from dtlayout.spec.kernel_records import AttentionKernel, RopeKernel
from dtlayout.spec.kernel_table import find_kernel
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.model_shape import ModelShape


class Llama(nn.Module):
    """The whole model, or the part of it that a pipeline stage holds.

    Takes tokens [B, S] where it has the embedding, else the hidden states [B, S, D] of the part before. Gives hidden
    states without the head; with it logits [B, S, V], or the loss where targets come in.
    """

    def __init__(
        self,
        shape: ModelShape,
        kernels: Kernels,
        max_seq_len: int,
        *,
        layers: Sequence[int] | None = None,
        embedding: bool = True,
        head: bool = True,
        dtype: torch.dtype = torch.float32,
    ):
        """`layers` are the blocks to hold, all by default; `max_seq_len` the positions that RoPE's tables cover."""
        super().__init__()
        blocks = range(shape.num_layers) if layers is None else layers
        self.model = Decoder(shape, kernels, max_seq_len, blocks, embedding=embedding, norm=head, dtype=dtype)
        self.lm_head = Head(shape.hidden_size, shape.vocab_size, kernels.loss, dtype) if head else None
        if self.lm_head is not None:
            self.lm_head.columns.num_unused = shape.unused_rows
        if shape.tied_embeddings and self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.weight = self.model.embed_tokens.weight
        attach_adapters(self, shape)

    def forward(
        self,
        x: Tensor,
        documents: Documents | None = None,
        *,
        targets: Tensor | None = None,
        num_targets: Tensor | float = 1.0,
    ) -> Tensor:
        """The loss is the sum of -log p over the valid `targets` [B, S], divided by `num_targets`, which is their
        number in the whole step.

        With `documents` a token sees no other document than its own. `documents` do not change the targets: the last
        token of a document predicts the first of the next.
        """
        h_BSD = self.model(x, documents)
        return h_BSD if self.lm_head is None else self.lm_head(h_BSD, targets, num_targets)


class Decoder(nn.Module):
    """Embedding, blocks and final norm; named `model` inside a Llama as in HF's."""

    def __init__(
        self,
        shape: ModelShape,
        kernels: Kernels,
        max_seq_len: int,
        layers: Sequence[int],
        *,
        embedding: bool,
        norm: bool,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.prepare_mask = partial(prepare_mask, kernel=kernels.attention)
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size, dtype=dtype) if embedding else None
        self.rotary = RotaryEmbedding(shape, max_seq_len, dtype)
        self.layers = nn.ModuleDict({str(i): Block(shape.kind_of(i), kernels, dtype) for i in layers})
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps, kernels.norm, dtype) if norm else None

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        h_BSD = x if self.embed_tokens is None else self.embed_tokens(x)
        mask = None if documents is None else self.prepare_mask(documents, like=h_BSD)
        cos, sin = self.rotary.tables(documents)
        for block in self.layers.values():
            h_BSD = block(h_BSD, cos, sin, mask)
        return h_BSD if self.norm is None else self.norm(h_BSD)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, shape: ModelShape, kernels: Kernels, dtype: torch.dtype):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps, kernels.norm, dtype)
        self.self_attn = Attention(shape, kernels, dtype)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps, kernels.norm, dtype)
        self.mlp = (FeedForward if shape.experts is None else Mixture)(shape, kernels, dtype)

    def forward(self, h_BSD: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        h_BSD = h_BSD + self.self_attn(self.input_layernorm(h_BSD), cos=cos, sin=sin, mask=mask)
        return h_BSD + self.mlp(self.post_attention_layernorm(h_BSD))


class Attention(nn.Module):
    """Grouped-query causal self-attention with rotary positions."""

    def __init__(self, shape: ModelShape, kernels: Kernels, dtype: torch.dtype):
        super().__init__()
        width, bias = shape.hidden_size, shape.qkv_bias
        self.head_width = shape.head_width
        self.attend = bind_attention(find_kernel(AttentionKernel, kernels.attention))
        self.rope = find_kernel(RopeKernel, kernels.rope).load()
        self.project: Project = project
        self.q_proj = nn.Linear(width, shape.query_width, bias=bias, dtype=dtype)
        self.k_proj = nn.Linear(width, shape.kv_width, bias=bias, dtype=dtype)
        self.v_proj = nn.Linear(width, shape.kv_width, bias=bias, dtype=dtype)
        self.o_proj = nn.Linear(shape.query_width, width, bias=False, dtype=dtype)
        self.q_norm = RMSNorm(self.head_width, shape.norm_eps, kernels.norm, dtype) if shape.qk_norm else None
        self.k_norm = RMSNorm(self.head_width, shape.norm_eps, kernels.norm, dtype) if shape.qk_norm else None

    def forward(self, x_BSD: Tensor, *, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        projected = self.project(x_BSD, self.q_proj, self.k_proj, self.v_proj)
        # -1: tensor parallelism decides how many heads are local
        q_BSHK, k_BSGK, v_BSGK = (p.unflatten(-1, (-1, self.head_width)) for p in projected)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHK, k_BSGK = self.q_norm(q_BSHK), self.k_norm(k_BSGK)
        q_BHSK, k_BGSK, v_BGSK = (t.transpose(1, 2) for t in (q_BSHK, k_BSGK, v_BSGK))
        q_BHSK, k_BGSK = self.rope(q_BHSK, k_BGSK, cos, sin)
        out_BHSK = self.attend(q_BHSK, k_BGSK, v_BGSK, mask)
        return self.o_proj(out_BHSK.transpose(1, 2).flatten(2))
