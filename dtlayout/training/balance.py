"""Routers of a rank's stages: the targets that divide their losses, their counts, and biases that counts move."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dtlayout.models.feed_forward import Mixture
from dtlayout.spec.model_shape import ModelShape
from dtlayout.training.routing import Routing


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
