"""What a backward in two parts keeps between them."""

import weakref
from collections import Counter
from unittest import mock

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

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
    work = DelayedWeightGradient([get_gradient_edge(weight)], gradient, gradient)
    with mock.patch.object(DelayedWeightGradient, "make", lambda self: [gradient]):
        accumulate([work])
    assert weight.grad is gradient


def test_parts_of_a_parameter_that_share_a_graph_get_their_gradients_at_once() -> None:
    both = nn.Parameter(torch.randn(5, 4))
    scaled = both * both  # a graph that keeps something
    weight, bias = scaled[:4], scaled[4]
    work = DelayedWeightGradient(
        [get_gradient_edge(weight), get_gradient_edge(bias)], torch.randn(3, 4), torch.randn(3, 4)
    )
    of_weight, of_bias = work.make()
    accumulate([work])
    assert torch.allclose(both.grad, 2 * both * torch.cat([of_weight, of_bias[None]]))
