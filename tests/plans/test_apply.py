"""Recomputation of blocks; tensor styles and sharding are tested on ranks."""

import pytest
import torch
from torch import nn

from dtlayout.errors import InvalidConfig
from dtlayout.plans.apply import prepare_blocks
from dtlayout.recompute import Recompute


class Counting(nn.Linear):
    """Counts its forwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards = getattr(self, "forwards", 0) + 1
        return super().forward(x)


@pytest.mark.parametrize(("mode", "forwards"), [("none", [1, 1, 1]), ("full", [2, 2, 2]), ("every-2", [1, 2, 1])])
def test_exactly_the_covered_blocks_run_forward_twice(mode: str, forwards: list[int]) -> None:
    model = nn.Sequential(Counting(4, 4), Counting(4, 4), Counting(4, 4))
    prepare_blocks(model, "*", Recompute.parse(mode), compiles=False)
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert [block.forwards for block in model] == forwards


def test_blocks_without_a_number_cannot_be_counted() -> None:
    with pytest.raises(InvalidConfig, match=r"plan.blocks='\*' matches 'head', whose last part is no number"):
        prepare_blocks(nn.ModuleDict({"head": nn.Linear(2, 2)}), "*", Recompute.parse("full"), compiles=False)
