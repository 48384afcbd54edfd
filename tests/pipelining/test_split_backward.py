"""What a backward in two parts keeps between them."""

import weakref

import torch
from torch import nn

from dtlayout.pipelining.split_backward import StageWeights, accumulate


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
