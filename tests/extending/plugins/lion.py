"""Lion, arXiv:2302.06675, as somebody adds it who has no checkout: what predictions, configs and checkpoints know."""

from dataclasses import dataclass

from dtlayout import Optimizer, register_optimizer
from dtlayout.base.validators import ranged


@register_optimizer
@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """The sign of a momentum that looks ahead, kept in half the format of fp32 parameters."""

    name: str = "lion"
    weight_decay: float = ranged("must not be negative", 1.0)
    """Decay of matrices for each unit of learning rate; norms have none."""
    lookahead: float = ranged("must lie between 0 and 1", 0.9)
    """Share of the momentum in an update."""
    momentum_decay: float = ranged("must lie between 0 and 1", 0.99)
    """Share of the momentum that stays."""

    torch_class = "extending.plugins.lion_torch:Lion"

    @property
    def torch_arguments(self):
        return {"lookahead": self.lookahead, "momentum_decay": self.momentum_decay}

    @property
    def state(self):
        return {"momentum": "bfloat16"}
