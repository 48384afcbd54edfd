"""Choice: the products by which a block chooses what attention reads, as an indexer of sparse attention does. No torch.

An indexer multiplies small queries and keys of each pair of tokens, and takes the tokens with the largest sums
(DeepSeek-V3.2, arXiv:2512.02556, eq. 1). It leaves whole numbers, so it has no backward, and keeps nothing.
"""

from dataclasses import dataclass

from dtlayout.models.operations import BaseOperation
from dtlayout.models.tape import TapeEntry, TapeOptions


@dataclass(frozen=True)
class TokenChoice(BaseOperation):
    """A product of queries and keys that chooses tokens, of which forward alone computes the scores."""

    module: str
    """Name of the module in the block."""
    num_heads: int
    """Scores of each pair of tokens."""
    width: int
    """Elements of a query that are multiplied for each score."""
    exact: bool = False
    """True if it multiplies in fp32, whatever format the model computes in."""

    def record(self, options: TapeOptions) -> tuple[TapeEntry, ...]:
        """No entry: what it holds are scores, which attention counts (`models.scores`)."""
        return ()

    def flops_per_token(self, seq_len: int) -> float:
        """Scores of a token with all tokens of its sequence.

        >>> TokenChoice("indexer", num_heads=64, width=128).flops_per_token(4096)
        67108864.0
        """
        return 2.0 * self.num_heads * self.width * seq_len
