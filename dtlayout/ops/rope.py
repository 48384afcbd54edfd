"""Rotary position embedding (arXiv:2104.09864) in the convention of HF's Llama: halves rotated, not pairs.

Legend: B batch, S sequence, H heads (H of queries, G of keys and values), K head width.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dtlayout.ops.documents import Documents
from dtlayout.spec.model_shape import ModelShape, RopeScaling


class RotaryEmbedding(nn.Module):
    """Tables cos and sin, [max_seq_len, K], of the angles at every position, or at those that `hold` names.

    The tables are derived data, and in no checkpoint. A module built on the meta device has no values in them: once it
    has got its memory, call `reset_buffers`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape, max_seq_len: int, dtype: torch.dtype):
        super().__init__()
        self.shape = shape
        self.max_seq_len = max_seq_len
        self.positions: tuple[range, ...] = (range(max_seq_len),)
        self.find_positions: Callable[[Documents], Tensor] | None = None
        """Function from documents to this rank's positions, [s]; None where documents don't decide them."""
        self.table_dtype = torch.promote_types(dtype, torch.float32)  # bf16 cannot tell far positions apart
        table = torch.empty(max_seq_len, shape.head_width, dtype=self.table_dtype)
        self.register_buffer("cos", table, persistent=False)
        self.register_buffer("sin", torch.empty_like(table), persistent=False)
        self.reset_buffers()

    def hold(self, positions: tuple[range, ...]) -> None:
        """Keep tables of these positions only, in this order, one row for each token that this rank has."""
        self.positions = positions
        for name in ("cos", "sin"):
            table = getattr(self, name).new_empty(sum(map(len, positions)), self.shape.head_width)
            self.register_buffer(name, table, persistent=False)
        self.reset_buffers()

    def reset_buffers(self, device: torch.device | str | None = None) -> None:
        """Compute both tables on their device, or on another one, to which they go."""
        if device is not None and self.cos.device.type != torch.device(device).type:
            self.to_empty(device=device)
        if self.cos.is_meta:
            return
        cos, sin = self._compute(torch.cat([torch.arange(each.start, each.stop) for each in self.positions]))
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    def tables(self, documents: Documents | None) -> tuple[Tensor, Tensor]:
        """cos and sin for the tokens of this rank, which belong to these documents."""
        if documents is None or self.find_positions is None:
            return self.cos, self.sin
        return self._compute(self.find_positions(documents))

    def _compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"dtype": self.table_dtype, "device": self.cos.device, "non_blocking": True}
        angles = torch.outer(positions.to(**options), rotary_frequencies(self.shape).to(**options)).repeat(1, 2)
        return angles.cos(), angles.sin()


def rotary_frequencies(shape: ModelShape) -> Tensor:
    """Radians per position for each pair of a head's dimensions, [K/2], float64: theta^(-2i/K), or stretched."""
    exponents = torch.arange(0, shape.head_width, 2, dtype=torch.float64, device="cpu") / shape.head_width
    frequencies = shape.rope_theta**-exponents
    return stretch_frequencies(frequencies, shape.rope_scaling) if shape.rope_scaling else frequencies


def stretch_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Frequencies by Llama 3's rule: long wavelengths grow by `factor`, short ones stay, a linear blend between."""
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

    The kernel overwrites its inputs without telling autograd, and selective recomputation keeps these inputs. So it
    gets copies.
    """
    from liger_kernel.ops.rope import LigerRopeFunction

    seq_len = q_BHSK.shape[-2]
    return LigerRopeFunction.apply(q_BHSK.clone(), k_BGSK.clone(), cos[None, :seq_len], sin[None, :seq_len])
