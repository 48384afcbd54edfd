"""Scores: what attention holds for each pair of tokens where no kernel computes it in pieces. No torch.

Softcaps, sinks, biases of positions, masks and a family's own code make tensors with a number for each head and pair
of tokens. A trace measures them (`tracing/scores.py`), in bytes: of a score of one head, or of a pair of tokens.

Legend: H heads, S sequence.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple


class ScoreBytes(NamedTuple):
    """Bytes of attention for each score, in one number format of the model."""

    kept: float = 0.0
    """Kept for backward of each score, H·S² of a sequence."""
    in_forward: float = 0.0
    """Held by forward at its fullest, beside what is kept."""
    in_backward: float = 0.0
    """Held by backward at its fullest, beside what is kept."""
    products: float = 0.0
    """Results of batched matmuls, which some recomputations keep."""
    matmuls: float = 0.0
    """Results of all matmuls of queries and keys, which are what a compiler goes on from."""
    moved_forward: float = 0.0
    """Moved through memory by forward's passes over scores; matmuls are not counted."""
    moved_backward: float = 0.0
    """Moved likewise by backward's."""
    pair_kept: float = 0.0
    """Kept for backward of each pair of tokens whatever the heads, S² of a sequence: masks of a block of its own."""
    pair_in_forward: float = 0.0
    """Held likewise by forward at its fullest, beside what is kept."""
    pair_in_backward: float = 0.0
    """Held likewise by backward."""
    mask: float = 0.0
    """Masks that are made once for all blocks, for each pair of tokens."""
    keeps_mask: bool = False
    """True if backward reads these masks."""

    @property
    def are_in_memory(self) -> bool:
        """True if scores of heads lie in memory, and no kernel computes them in pieces."""
        return self.in_forward + self.kept > 0

    def compile(self, element_bytes: int) -> "ScoreBytes":
        """Bytes where a compiler sees the block whole.

        It keeps the product of queries and keys, and what is multiplied with values: seen of torch's partitioner. It is
        assumed to fuse all passes between matmuls into one kernel, which was not measured on a GPU.
        """
        if not self.are_in_memory:
            return self
        both = self.matmuls + element_bytes
        return ScoreBytes(
            kept=both, in_backward=both, products=self.products, matmuls=self.matmuls,
            moved_forward=both + self.matmuls, moved_backward=2 * both, mask=self.mask, keeps_mask=self.mask > 0,
        )  # fmt: skip

    @property
    def repeats_heads(self) -> bool:
        """True if keys and values are repeated for every query head."""
        return self.are_in_memory or self.pair_kept > 0


class SequenceScores(NamedTuple):
    """Bytes of attention for each score, in sequences of some lengths."""

    longer_than: int
    """Tokens than which sequences are longer; a window is wider than shorter ones."""
    half: ScoreBytes
    """Bytes where the model computes in a format of two bytes."""
    single: ScoreBytes
    """Bytes where it computes in fp32; fp64 takes twice as much."""


NONE = ScoreBytes()
"""Attention of a kernel without a mask."""


def find_score_bytes(scores: Sequence[SequenceScores], seq_len: int, element_bytes: int) -> ScoreBytes:
    """Bytes of attention in sequences of this length, with numbers of so many bytes.

    >>> find_score_bytes([SequenceScores(0, ScoreBytes(kept=10.0), ScoreBytes(kept=8.0))], 4096, 2).kept
    10.0
    """
    known = [each for each in scores if seq_len > each.longer_than]
    if not known:
        return NONE
    if element_bytes <= 2:
        return known[-1].half
    single = known[-1].single
    if element_bytes == 4:
        return single
    doubled = {name: 2 * value for name, value in single._asdict().items() if name != "keeps_mask"}
    return single._replace(**doubled)


def read_scores(values: Sequence[Sequence[Any]]) -> tuple[SequenceScores, ...]:
    """Scores from a trace's file, where they are lists."""
    return tuple(SequenceScores(longer, ScoreBytes(*half), ScoreBytes(*single)) for longer, half, single in values)


def describe_scores(scores: Sequence[SequenceScores]) -> str:
    """A line on attention of which each score lies in memory, and what that costs; empty where none does."""
    held = [each for each in scores if each.half.are_in_memory]
    if not held:
        return ""
    most = held[-1].half
    return (
        f"its scores are in memory: {most.kept:g} bytes kept for each score of a head in bf16, "
        f"{most.kept + max(most.in_forward, most.in_backward):g} at the fullest, and "
        f"{most.moved_forward + most.moved_backward:g} moved"
    )
