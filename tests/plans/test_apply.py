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
from dtlayout.ops.grouped import GROUPED, LOOP, GroupedMatmul, StackedLinear
from dtlayout.ops.scaled_groups import SCALED_LOOPS
from dtlayout.plans.apply import prepare_blocks
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.recompute import Recompute


class Counting(nn.Linear):
    """Counts its forwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards = getattr(self, "forwards", 0) + 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("mode", "forwards"), [("none", [1, 1, 1]), ("full", [2, 2, 2]), ("every-2", [1, 2, 1]), ("2-of-3", [1, 2, 2])]
)
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


class Experts(nn.Module):
    """Two matmuls of three experts, of which the second reads what is computed again of the first."""

    def __init__(self, kernel: GroupedMatmul) -> None:
        super().__init__()
        self.up, self.down = (StackedLinear(3, 16, 16, kernel, torch.float32) for _ in range(2))
        for each in self.parameters():
            nn.init.normal_(each)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([2, 2, 5], dtype=torch.int32)
        return self.down(nn.functional.silu(self.up(x, ends)), ends).sin()


@pytest.mark.parametrize(
    ("kernel", "operator"),
    [
        (GROUPED, "_grouped_mm"),
        (LOOP, "dtlayout::grouped_mm"),
        (SCALED_LOOPS["fp8-rowwise"], "dtlayout::scaled_grouped_mm"),
    ],
)
@pytest.mark.parametrize(
    ("mode", "again"), [("none", 0), ("full", 2), ("keep-attention", 2), ("keep-matmuls", 0), ("selective", 0)]
)
def test_matmuls_of_experts_are_kept_as_matmuls(kernel: GroupedMatmul, operator: str, mode: str, again: int) -> None:
    expected, block = (nn.ModuleDict({"0": Experts(kernel)}) for _ in range(2))
    block.load_state_dict(expected.state_dict())
    prepare_blocks(block, "*", Recompute.parse(mode), compiles=False)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    output = block["0"](x).sum()
    with CountOperators() as counted:
        output.backward()
    assert counted.num[operator] == 4 + again  # a gradient of rows and one of weights for each matmul
    expected["0"](x.detach()).sum().backward()
    for got, wanted in zip(block.parameters(), expected.parameters(), strict=True):
        assert torch.equal(got.grad, wanted.grad) and wanted.grad.any()


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
