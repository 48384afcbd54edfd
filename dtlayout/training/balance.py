"""Routers of a rank's stages: the targets that divide their losses, their counts, and biases that counts move."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dtlayout.models.feed_forward import Mixture
from dtlayout.spec.model_shape import ModelShape


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


class Balance:
    """The routers of a rank's stages."""

    def __init__(self, modules: Sequence[nn.Module], model: ModelShape):
        """`modules` are the stages of the rank, of the whole `model`; one without experts has no routers."""
        self.model = model
        named = (each for module in modules for each in module.named_modules())
        self.mixtures = {
            int(name.split(".")[-2]) - model.num_first: part for name, part in named if isinstance(part, Mixture)
        }
        """Block, counted among those with experts → its mixture."""
        self.num_blocks = model.num_layers - model.num_first if model.experts else 0
        self.width = model.experts.number + 2 if model.experts else 0
        self.size = self.num_blocks * self.width
        """Numbers of a step, the same on every rank."""

    def begin(self, num_targets: Tensor) -> None:
        """Call before the forwards of a step, with the number of targets in the global batch.

        A batch without any trains nothing, routers neither.
        """
        for mixture in self.mixtures.values():
            mixture.counts.num_targets = num_targets.masked_fill(num_targets == 0, torch.inf)

    def count(self) -> Tensor | None:
        """Counts of this rank's routers since the last call, fp64 [size]; their sum over all ranks is that of the step.

        None if no router has counted anything.
        """
        counted = ((block, mixture.counts.take()) for block, mixture in self.mixtures.items())
        rows = {block: row for block, row in counted if row is not None}
        if not rows:
            return None
        table = next(iter(rows.values())).new_zeros(self.num_blocks, self.width)
        for block, row in rows.items():  # one by one, since a list of places would be copied to the device
            table[block] = row
        return table.flatten()

    @torch.no_grad()
    def move_biases(self, numbers: Tensor, is_fine: Tensor) -> None:
        """Move the biases by the counts of all ranks (arXiv:2408.15664, alg. 1), unless the step is left out."""
        rules = self.model.experts
        if rules is None or not rules.bias_rate:
            return
        table = numbers.view(self.num_blocks, self.width)[:, : rules.number]
        moves = (table.mean(1, keepdim=True) - table).sign() * rules.bias_rate * is_fine
        for block, mixture in self.mixtures.items():
            assert mixture.correction_bias is not None, "a rate moves a bias"
            mixture.correction_bias.add_(moves[block].to(mixture.correction_bias))

    def describe(self, numbers: Sequence[float]) -> Routing | None:
        """The numbers of all ranks, as they came to the host; None without experts."""
        if self.model.experts is None:
            return None
        rows = [numbers[start : start + self.width] for start in range(0, self.size, self.width)]
        return Routing(
            first_block=self.model.num_first,
            copies=[row[:-2] for row in rows],
            per_token=self.model.experts.per_token,
            squares=[row[-2] for row in rows],
            entropies=[row[-1] for row in rows],
        )
