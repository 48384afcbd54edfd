"""Muon, as somebody adds it who has no checkout: torch's class takes a block's matrices, and AdamW takes the rest."""

from dataclasses import dataclass

from dtlayout import RoleOptimizer, register_optimizer
from dtlayout.base.validators import ranged


@register_optimizer
@dataclass(frozen=True, kw_only=True)
class TorchMuon(RoleOptimizer):
    """Momentum whose update is made orthogonal, for matrices; https://kellerjordan.github.io/posts/muon."""

    name: str = "torch-muon"
    lr: float = ranged("must be above 0 and finite", 2e-2)
    """Learning rate at the end of the warm-up."""
    weight_decay: float = ranged("must not be negative", 0.1)
    """Decay of matrices for each unit of learning rate."""
    momentum: float = ranged("must be at least 0 and below 1", 0.95)
    """Share of the momentum that stays."""

    roles = frozenset({"matrix"})
    needs_whole_weights = True
    torch_class = "torch.optim:Muon"

    @property
    def torch_arguments(self):
        return {"momentum": self.momentum}

    @property
    def state(self):
        return {"momentum_buffer": None}
