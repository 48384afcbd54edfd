"""Recomputation of blocks; tensor styles and sharding are tested on ranks."""

from collections import Counter

import pytest
import torch
from tiny import SHAPE
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.description import BLOCKS
from dtlayout.models.llama import Llama
from dtlayout.plans.apply import prepare_blocks
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.recompute import Recompute


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


@pytest.mark.parametrize(
    ("mode", "matmuls", "attention"),
    [("none", 0, 0), ("full", 6, 1), ("keep-attention", 6, 0), ("keep-matmuls", 0, 1), ("selective", 0, 0)],
)
def test_a_covered_block_computes_again_what_it_does_not_keep_but_its_last_matmul(
    mode: str, matmuls: int, attention: int
) -> None:
    model = Llama(SHAPE, Kernels(), max_seq_len=8)
    prepare_blocks(model, BLOCKS, Recompute.parse(mode), compiles=False)
    loss = model(torch.zeros(1, 8, dtype=torch.int64)).sum()
    with CountOperators() as counted:
        loss.backward()
    blocks, backward = SHAPE.num_layers, 2
    assert counted.num["mm"] == blocks * (7 * backward + matmuls) + backward
    assert counted.num["_scaled_dot_product_flash_attention_for_cpu"] == blocks * attention


class CountOperators(TorchDispatchMode):
    """Calls of each operator, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.num: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def test_blocks_without_a_number_cannot_be_counted() -> None:
    with pytest.raises(InvalidConfig, match=r"plan.blocks='\*' matches 'head', whose last part is no number"):
        prepare_blocks(nn.ModuleDict({"head": nn.Linear(2, 2)}), "*", Recompute.parse("full"), compiles=False)
