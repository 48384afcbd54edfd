"""LossScale: the factor of the loss that keeps fp16's small gradients from being 0, as it grows and shrinks.

A step whose gradients overflow halves it, and so many steps in a row that don't double it (arXiv:1710.03740, sec. 3.2;
torch's GradScaler has the same rule). All ranks know the same numbers of every step, so they come to the same factor
without asking. Checkpoints keep it for a run that is resumed.
"""

import math
from collections.abc import Mapping
from typing import Any

from dtlayout.config.config import Config
from dtlayout.training.result import StepResult

_OF_A_SEQUENCE = 65536.0
"""First factor in a batch of one sequence, GradScaler's."""


def halve(factor: float) -> float:
    """The factor after an overflow, 1 at least."""
    return max(1.0, factor / 2)


class LossScale:
    """The factor of the next step's loss."""

    def __init__(self, first: float, num_steps: int):
        """`first` is the factor of the first step; `num_steps` without an overflow double it."""
        self.value, self.num_steps = first, num_steps
        self.num_fine = 0
        """Steps in a row without an overflow since the factor has changed."""

    @classmethod
    def of(cls, config: Config) -> "LossScale | None":
        """The factor with which a run of a config begins; None where losses are not scaled."""
        if config.precision.compute != "float16":
            return None
        usual = _OF_A_SEQUENCE * 2.0 ** math.floor(math.log2(config.batches[0].global_batch))
        return cls(config.train.loss_scale or usual, config.train.loss_scale_steps)

    def add(self, result: StepResult) -> None:
        """Count a step: the factor is then that of the step after it. A loss that is not finite says nothing of it."""
        if result.overflows:
            self.value, self.num_fine = halve(self.value), 0
        elif result.is_finite:
            self.num_fine += 1
        if self.num_fine >= self.num_steps:  # a resumed run may ask for fewer
            self.value, self.num_fine = 2 * self.value, 0

    def to_dict(self) -> dict[str, Any]:
        """The table that a checkpoint keeps for `restore`; JSON gives back each bit of it."""
        return {"value": self.value, "num_fine": self.num_fine}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from the table of a checkpoint; that of a run whose losses were not scaled is empty."""
        self.value, self.num_fine = float(saved.get("value", self.value)), int(saved.get("num_fine", 0))
