"""Names of weights on disk: from a weight of ours to the tensors of a Hugging Face folder that hold it. No torch.

Both ends of a model, attention and norms are called alike on both sides. A table of a family has the other weights of a
block. Experts are one stack here, [experts, outputs, inputs], and on disk a tensor each, [outputs, inputs].
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dtlayout.models.weight import Piece, Weight

NUMBER = "*"
"""Stands for the number of an expert in a name on disk."""
_MATRICES = ("gate_proj", "up_proj", "down_proj")
STORED_NAMES: Mapping[str, str] = {
    **{f"mlp.experts.{matrix}.weight": f"mlp.experts.{NUMBER}.{matrix}.weight" for matrix in _MATRICES},
    **{f"mlp.shared_expert.{matrix}.weight": f"mlp.shared_experts.{matrix}.weight" for matrix in _MATRICES},
    "mlp.correction_bias": "mlp.gate.e_score_correction_bias",
}
"""Weight of a block → its name on disk, for families that do as DeepSeek-V3; Qwen3-MoE has no shared expert."""
MIXTRAL_NAMES: Mapping[str, str] = {
    "mlp.gate.weight": "block_sparse_moe.gate.weight",
    "mlp.experts.gate_proj.weight": f"block_sparse_moe.experts.{NUMBER}.w1.weight",
    "mlp.experts.up_proj.weight": f"block_sparse_moe.experts.{NUMBER}.w3.weight",
    "mlp.experts.down_proj.weight": f"block_sparse_moe.experts.{NUMBER}.w2.weight",
}
"""Weight of a block → its name on disk, for Mixtral."""


@dataclass(frozen=True)
class StoredWeight:
    """A weight, and the tensors of a folder that hold it."""

    name: str
    """The weight's name in the whole model."""
    shape: tuple[int, ...]
    """The weight's shape; a stack begins with its experts."""
    tensors: tuple[str, ...]
    """Names on disk: one, or of a stack one for each expert, in their order."""
    is_stack: bool
    """Whether each expert has a tensor of its own."""
    is_counter: bool
    """Whether a step counts it, so that a format that is coarser than float32 would spoil it."""
    piece: Piece | None = None
    """Rows of its tensor that it is, where the tensor holds more, or lies transposed."""
    unit_dim: int | None = None
    """Dimension of size 1 that the tensor on disk has beside the weight's, as the vectors of an adapter have one."""

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each tensor on disk."""
        if self.piece is not None:
            return self.piece.find_shape(self.shape)
        if self.unit_dim is not None:
            return (*self.shape[: self.unit_dim], 1, *self.shape[self.unit_dim :])
        return self.shape[1:] if self.is_stack else self.shape


def store(weight: Weight, block: str, table: Mapping[str, str]) -> StoredWeight:
    """The weight with its tensors by a family's table; `block` is the prefix of its name, empty outside of blocks."""
    name = weight.name if weight.piece is None else weight.piece.name
    pattern = table.get(name, name) if block else name
    is_stack = NUMBER in pattern
    names = [pattern.replace(NUMBER, str(i)) for i in range(weight.shape[0])] if is_stack else [pattern]
    tensors = tuple(f"{block}{each}" for each in names)
    return StoredWeight(f"{block}{weight.name}", weight.shape, tensors, is_stack, weight.is_counter, weight.piece)
