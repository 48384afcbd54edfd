"""Mixer: what a block with a state computes along the sequence, between its matmuls. No torch.

State-space blocks (Mamba), linear attention (Gated DeltaNet, Lightning) and short convolutions carry a state of a fixed
size from token to token. What they compute and hold grows with the tokens of a sequence, not with their square. It is
torch's own operations that a trace measures (`tracing/states.py`); a kernel of another package moves and holds less.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dtlayout.models.operations import BaseOperation, name_trained
from dtlayout.models.tape import BlockTensor, TapeEntry, TapeOptions
from dtlayout.models.weight import Weight


class TokenElements(NamedTuple):
    """Elements of a token that are held."""

    compute: float = 0.0
    """Elements in the format that the model computes in."""
    exact: float = 0.0
    """Elements in fp32, whatever that format is."""


NOTHING = TokenElements()
"""No elements."""


@dataclass(frozen=True)
class Mixer(BaseOperation):
    """A state along the sequence, and the passes around it. tp does not split it."""

    module: str
    """Name of the module in the block."""
    makes: str
    """Name of its result on a tape."""
    reads: tuple[tuple[str, int], ...]
    """Name and elements of a token of each tensor that it reads."""
    width: int
    """Elements of a token of its result."""
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Name and shape of its parameters: a convolution's, the decay, vectors."""
    trains: bool = True
    """True if its parameters are trained."""
    flops: float = 0.0
    """FLOPs of a token's matmuls and convolutions in the compute format, in forward; matmuls by a weight of the block
    are not among them."""
    exact_flops: float = 0.0
    """FLOPs of those in fp32."""
    product_moves: tuple[float, float] = (0.0, 0.0)
    """Bytes of a token that these read and write: in a format of two bytes, and in fp32."""
    moves: tuple[float, float] = (0.0, 0.0)
    """Bytes of a token that forward's other operations move, likewise."""
    kept: TokenElements = NOTHING
    """Elements of a token that it keeps for backward."""
    in_forward: TokenElements = NOTHING
    """Elements that forward holds at its fullest, beside what is kept and its result."""
    in_backward: TokenElements = NOTHING
    """Elements that backward holds at its fullest, beside what is kept."""

    @cached_property
    def weights(self) -> tuple[Weight, ...]:  # type: ignore[override]
        """Parameters, none of which multiplies tokens as a linear layer does."""
        return tuple(Weight(name, shape, "ones", "vector", trains=self.trains) for name, shape in self.parameters)

    def record(self, options: TapeOptions) -> tuple[TapeEntry, ...]:
        """One entry, whatever number of operations it is."""
        reads = tuple(BlockTensor(name, width, "stream") for name, width in self.reads)
        made = BlockTensor(self.makes, self.width, "stream")
        moves = tuple(each / self.width for each in self.moves)
        return (
            TapeEntry(
                "mixer", reads, (made,), self._list("kept", self.kept), name_trained(self.weights),
                scratch=self._list("backward", self.in_backward) or None,
                forward_scratch=self._list("forward", self.in_forward), moves=moves,  # type: ignore[arg-type]
            ),
        )  # fmt: skip

    def _list(self, word: str, elements: TokenElements) -> tuple[BlockTensor, ...]:
        """A tensor for each format of which some elements are held."""
        pairs = zip(("compute", "exact"), elements, strict=True)
        return tuple(
            BlockTensor(f"{self.makes}.{word} {name}", width, "stream", name)  # type: ignore[arg-type]
            for name, width in pairs
            if width > 0
        )


def describe_state(state: Mixer) -> str:
    """A line on what torch's own operations hold of a state.

    >>> describe_state(Mixer("mamba", "mamba.mixed", (("mamba.in_proj", 8),), 4, kept=TokenElements(8, 4)))
    "torch's own operations keep 32 bytes of a token in bf16"
    """
    return f"torch's own operations keep {2 * state.kept.compute + 4 * state.kept.exact:,.0f} bytes of a token in bf16"
