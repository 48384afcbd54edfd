"""Rotary position embedding (arXiv:2104.09864) in the convention of HF's Llama: halves rotated, not pairs.

Legend: B batch, S sequence, H heads (H of queries, G of keys and values), K head width.
"""

import math

import torch
from torch import Tensor, nn

from dtlayout.model_shape import ModelShape, RopeScaling


class RotaryEmbedding(nn.Module):
    """The tables cos and sin, [max_seq_len, K], of every position's angles.

    They are derived data: not in any checkpoint, and filled by `reset_buffers` after a module built on the meta device
    has got its memory.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape, max_seq_len: int, dtype: torch.dtype):
        super().__init__()
        self.shape = shape
        self.max_seq_len = max_seq_len
        self.table_dtype = torch.promote_types(dtype, torch.float32)  # bf16 cannot tell far positions apart
        table = torch.empty(max_seq_len, shape.head_width, dtype=self.table_dtype)
        self.register_buffer("cos", table, persistent=False)
        self.register_buffer("sin", torch.empty_like(table), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Compute both tables on the device where they lie."""
        if self.cos.is_meta:
            return
        positions = torch.arange(self.max_seq_len, dtype=self.table_dtype, device=self.cos.device)
        angles = torch.outer(positions, rotary_frequencies(self.shape).to(self.cos)).repeat(1, 2)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())


def rotary_frequencies(shape: ModelShape) -> Tensor:
    """Radians per position of each pair of a head's dimensions, [K/2], float64: theta^(-2i/K), or stretched."""
    exponents = torch.arange(0, shape.head_width, 2, dtype=torch.float64, device="cpu") / shape.head_width
    frequencies = shape.rope_theta**-exponents
    return stretch_frequencies(frequencies, shape.rope_scaling) if shape.rope_scaling else frequencies


def stretch_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's rule: long wavelengths become `factor` times longer, short ones stay, in between a linear blend."""
    turns = scaling.original_context * frequencies / (2 * math.pi)  # turns within the original context
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def apply_rope(x_BHSK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys by their position; the tables cover at least S positions. Result in the dtype of x."""
    seq_len = x_BHSK.shape[-2]
    x = x_BHSK.to(cos.dtype)
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x * cos[:seq_len] + rotated * sin[:seq_len]).to(x_BHSK.dtype)


def eager_rope(q_BHSK: Tensor, k_BGSK: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, one operation after the other."""
    return apply_rope(q_BHSK, cos, sin), apply_rope(k_BGSK, cos, sin)


def liger_rope(q_BHSK: Tensor, k_BGSK: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by liger-kernel, in fp32 or finer.

    It writes over its inputs without telling autograd, and selective recomputation keeps these: so it gets copies.
    """
    from liger_kernel.ops.rope import LigerRopeFunction

    seq_len = q_BHSK.shape[-2]
    return LigerRopeFunction.apply(q_BHSK.clone(), k_BGSK.clone(), cos[None, :seq_len], sin[None, :seq_len])
