"""Experts' matmuls in fp8: each expert is a linear layer by itself, to the bit."""

import pytest
import torch
from torch import Tensor

from dtlayout.ops.grouped import multiply_groups
from dtlayout.ops.scaled import multiply_rowwise, multiply_tensorwise
from dtlayout.ops.scaled_groups import SCALED_LOOPS

MULTIPLY = {"fp8-tensorwise": multiply_tensorwise, "fp8-rowwise": multiply_rowwise}
D, N = 48, 32
COUNTS = [(21, 0, 5, 32), (0, 0, 0, 7), (1, 3, 2, 1), (0, 0, 0, 0)]
"""Rows of each expert; few of them are a multiple of 16."""


def make(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    """Numbers whose scales differ by row, column and matrix."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    for dim in range(len(shape)):
        x *= torch.randn([size if i == dim else 1 for i, size in enumerate(shape)], generator=generator).exp()
    return x.to(dtype).requires_grad_()


def multiply_one_by_one(name: str, x: Tensor, weight: Tensor, counts: tuple[int, ...], scores: Tensor) -> Tensor:
    """Each expert that has rows as a linear layer."""
    rows = (x * scores[:, None]).to(x.dtype).split(counts)
    parts = zip(rows, weight, strict=True)
    return torch.cat([MULTIPLY[name](part, matrix) if len(part) else part @ matrix.t() for part, matrix in parts])


@pytest.mark.parametrize("name", MULTIPLY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_results_and_gradients_are_those_of_a_linear_layer_for_each_expert_to_the_bit(name, dtype, counts):
    x, weight = make(sum(counts), D, dtype=dtype), make(4, N, D, dtype=dtype, seed=2)
    scores, ends = make(sum(counts), dtype=torch.float32, seed=3), torch.tensor(counts).cumsum(0).int()
    upstream = make(sum(counts), N, dtype=dtype, seed=4).detach()
    given = x, weight, scores
    output = multiply_groups(x, weight, ends, SCALED_LOOPS[name], scores)
    found = output, *torch.autograd.grad(output, given, upstream)
    one_by_one = multiply_one_by_one(name, x, weight, counts, scores)
    expected = one_by_one, *torch.autograd.grad(one_by_one, given, upstream)
    assert all(map(torch.equal, found, expected))
    put_off = []
    output = multiply_groups(x, weight, ends, SCALED_LOOPS[name], scores, put_off.append)
    assert torch.autograd.grad(output, x, upstream)[0].equal(found[1]) and put_off[0]().equal(found[2])


def test_compiled_it_is_one_graph_with_the_same_bits():
    x, weight, ends = make(9, D), make(4, N, D, seed=2), torch.tensor([2, 2, 7, 9], dtype=torch.int32)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return multiply_groups(x, weight, ends, SCALED_LOOPS["fp8-rowwise"])

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    results = [
        (output, *torch.autograd.grad(output.sum(), (x, weight)))
        for output in (each(x, weight) for each in (compiled, run))
    ]
    assert all(map(torch.equal, *results))
