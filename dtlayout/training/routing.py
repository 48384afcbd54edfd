"""Routing: the choices of all routers in a step, as numbers on the host. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Routing:
    """Choices of all routers in a step; equal on every rank."""

    first_block: int
    """Number of the first block with experts."""
    copies: Sequence[Sequence[float]]
    """Tokens of each expert, for each block with experts: those that it computed in the step."""
    per_token: int
    """Experts of a token."""
    squares: Sequence[float]
    """Sum over tokens of the square of the log-sum-exp of a router's logits, for each block."""
    entropies: Sequence[float]
    """Sum over tokens of the entropy of the scores, nats, for each block."""

    @property
    def num_tokens(self) -> float:
        """Tokens of the step."""
        return sum(self.copies[0]) / self.per_token

    @property
    def fullest(self) -> tuple[float, int]:
        """Tokens of the fullest expert over the mean of its block, and the number of that block."""
        shares = [max(of_block) * len(of_block) / sum(of_block) for of_block in self.copies]
        return max(shares), self.first_block + shares.index(max(shares))

    def imbalance(self, ep: int) -> float:
        """Copies that the fullest of ep's ranks computed over their mean, in the block where that is highest."""
        here = len(self.copies[0]) // ep
        starts = range(0, here * ep, here)
        return max(
            max(sum(of_block[first : first + here]) for first in starts) * ep / sum(of_block)
            for of_block in self.copies
        )

    @property
    def entropy(self) -> float:
        """Mean entropy of a token's scores, nats; the logarithm of the number of experts where all are even."""
        return sum(self.entropies) / (len(self.entropies) * self.num_tokens)

    @property
    def mean_square(self) -> float:
        """Mean square of the log-sum-exp of logits, which the z loss keeps small."""
        return sum(self.squares) / (len(self.squares) * self.num_tokens)
