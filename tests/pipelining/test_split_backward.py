"""What a backward in two parts keeps between them."""

import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from dtlayout.dryrun.world import fake_world
from dtlayout.ops.grouped import GROUPED, LOOP, GroupedMatmul, StackedLinear, multiply_groups
from dtlayout.pipelining.split_backward import DelayedWeightGradient, StageWeights, accumulate


def test_between_both_parts_neither_the_input_of_the_stage_nor_its_gradient_is_kept() -> None:
    stage = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    weights = StageWeights(stage)
    x = torch.randn(3, 4, requires_grad=True)
    with weights.put_off() as found:
        stage(x).sum().backward()
    assert x.grad is not None
    kept = [weakref.ref(each.untyped_storage()) for each in (x, x.grad)]
    del x
    assert [each() for each in kept] == [None, None]
    assert stage[1].weight.grad is None
    accumulate(found)
    assert stage[1].weight.grad is not None


def test_what_was_put_off_adds_up_over_microbatches_and_hooks_are_told() -> None:
    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    weights, told = StageWeights(stage), Counter[int]()
    for parameter in stage.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: told.update([id(p)]))
    x, made = torch.randn(3, 4), list[list[torch.Tensor]]()
    parameters = [stage[1].weight, stage[0].weight, stage[0].bias]  # as backward comes by
    for _ in range(2):
        with weights.put_off() as found:
            stage(x).sum().backward()
        made.append([gradient for work in found for gradient in work.make()])
        told.clear()
        accumulate(found)
        assert told == {id(parameter): 1 for parameter in parameters}
    for parameter, first, second in zip(parameters, *made, strict=True):
        assert torch.equal(parameter.grad, first + second)


def test_no_gradient_that_was_put_off_is_copied() -> None:
    weight, gradient = nn.Parameter(torch.zeros(4, 4)), torch.randn(4, 4)
    accumulate([DelayedWeightGradient([get_gradient_edge(weight)], lambda: [gradient])])
    assert weight.grad is gradient


def test_parts_of_a_parameter_that_share_a_graph_get_their_gradients_at_once() -> None:
    both = nn.Parameter(torch.randn(5, 4))
    scaled = both * both  # a graph that keeps something
    weight, bias = scaled[:4], scaled[4]
    made = [torch.randn(4, 4), torch.randn(4)]
    accumulate([DelayedWeightGradient([get_gradient_edge(weight), get_gradient_edge(bias)], lambda: made)])
    assert torch.allclose(both.grad, 2 * both * torch.cat([made[0], made[1][None]]))


DTYPES = [(LOOP, torch.float64), (GROUPED, torch.float32), (GROUPED, torch.bfloat16)]


class Experts(nn.Module):
    """Experts beside a linear layer that scores their rows; an expert has none, and one weight is a part of another."""

    def __init__(self, kernel: GroupedMatmul, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up, self.down = (StackedLinear(4, 8, 8, kernel, dtype) for _ in range(2))
        self.score = nn.Linear(8, 1, dtype=dtype)
        self.whole = nn.Parameter(torch.zeros(4, 16, 8, dtype=dtype))
        for each in self.parameters():
            nn.init.normal_(each, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 2, 6, 7], dtype=torch.int32)
        scores = self.score(x).squeeze(-1).to(torch.promote_types(x.dtype, torch.float32)).sigmoid()
        part = self.whole[:, ::2]  # as a style makes this rank's part, with a graph behind it that keeps nothing
        hidden = self.up.multiply(x, part, ends, self.up.kernel)
        return self.down(nn.functional.silu(self.up(hidden, ends)), ends, scores).sin()


def run_split(module: Experts, x: Tensor, is_recomputed: bool) -> tuple[list[Tensor], list[int]]:
    """Gradients of two microbatches with weights put off, and how many gradients each put off."""
    weights, counts = StageWeights(module), []
    for part in x.unbind():
        with weights.put_off() as found:
            output = checkpoint(module, part, use_reentrant=False) if is_recomputed else module(part)
            output.float().sum().backward()
        assert module.down.weight.grad is None or counts, "gradients of weights come with `accumulate`"
        counts.append(len(found))
        accumulate(found)
    return [each.grad for each in module.parameters()], counts


@pytest.mark.parametrize(("kernel", "dtype"), DTYPES)
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_weights_of_experts_that_are_put_off_get_what_an_unsplit_backward_gives(kernel, dtype, is_recomputed) -> None:
    x = torch.randn(2, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    unsplit, split = Experts(kernel, dtype), Experts(kernel, dtype)
    given, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    for part in given.unbind():
        unsplit(part).float().sum().backward()
    gradients, counts = run_split(split, other, is_recomputed)
    assert counts == [4, 4]  # three matmuls of experts, and the linear layer
    assert torch.equal(given.grad, other.grad)
    for (name, parameter), got in zip(unsplit.named_parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, got) and got.any(), name


def test_experts_of_which_a_rank_has_some_get_their_gradients_through_the_dtensor() -> None:
    layer, ends = StackedLinear(4, 8, 8, LOOP, torch.float64), torch.tensor([2, 7], dtype=torch.int32)
    mine, x = torch.randn(2, 8, 8, dtype=torch.float64), torch.randn(7, 8, dtype=torch.float64)
    with fake_world(rank=0, world_size=2):
        layer.weight = nn.Parameter(DTensor.from_local(mine, init_device_mesh("cpu", (2,)), [Shard(0)]))
        with StageWeights(layer).put_off() as found:
            layer.multiply(x, layer.weight.to_local(), ends, LOOP).sin().sum().backward()
        assert layer.weight.grad is None and len(found) == 1
        accumulate(found)
        got = layer.weight.grad
        assert isinstance(got, DTensor) and got.placements == (Shard(0),) and got.shape == (4, 8, 8)
        mine.requires_grad_()
        multiply_groups(x, mine, ends, LOOP).sin().sum().backward()
        assert torch.equal(got.to_local(), mine.grad)


def test_frozen_weights_of_experts_are_not_put_off_and_scores_have_their_gradient() -> None:
    module = Experts(LOOP, torch.float64)
    for each in (module.up.weight, module.down.weight, module.whole):
        each.requires_grad_(False)
    weights = StageWeights(module)
    with weights.put_off() as found:
        module(torch.ones(7, 8, dtype=torch.float64)).sum().backward()
    assert len(found) == 1
    accumulate(found)
    assert module.score.weight.grad.any() and module.up.weight.grad is None


def test_experts_whose_weights_are_put_off_keep_neither_the_input_of_the_stage_nor_its_gradient() -> None:
    module = Experts(LOOP, torch.float64)
    weights = StageWeights(module)
    x = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    with weights.put_off() as found:
        module(x * 2).sum().backward()
    kept = [weakref.ref(each.untyped_storage()) for each in (x, x.grad)]
    del x
    assert [each() for each in kept] == [None, None] and found
