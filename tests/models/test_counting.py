"""Counts: FLOPs are what torch's own counter sees, and MFU's convention is the study's."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dtlayout.kernels import Kernels
from dtlayout.model_shape import ModelShape
from dtlayout.models import counting
from dtlayout.models.llama import Llama
from dtlayout.models.presets import find_preset

SHAPE = ModelShape(name="m", hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_size=48, vocab_size=40)
SEQ_LEN = 16


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_the_parts_add_up_to_the_parameters_of_the_model(kv_heads, tied):
    shape = replace(SHAPE, num_kv_heads=kv_heads, tied_embeddings=tied)
    with torch.device("meta"):
        model = Llama(shape, Kernels(), SEQ_LEN)
    assert counting.count_block_parameters(shape) == sum(p.numel() for p in model.model.layers["0"].parameters())
    assert counting.count_embedding_parameters(shape) == model.lm_head.weight.numel()
    assert counting.count_parameters(shape) == sum(p.numel() for p in model.parameters())


def test_forward_flops_are_those_that_torch_counts():
    """torch counts the matmuls alone, so the norms' weights, which have none, come off."""
    with torch.device("meta"):
        model = Llama(SHAPE, Kernels(attention="sdpa-math"), SEQ_LEN)
        tokens = torch.zeros(2, SEQ_LEN, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    block = counting.count_block_flops_per_token(SHAPE, SEQ_LEN) - 2 * 2 * SHAPE.hidden_size
    head = counting.count_head_flops_per_token(SHAPE)
    assert counter.get_total_flops() == 2 * SEQ_LEN * (SHAPE.num_layers * block + head)


def test_model_flops_follow_the_study():
    """6·N + 12·L·h·s; arXiv:2311.05610 trains Llama-13B on sequences of 2048."""
    shape = find_preset("llama-13b")
    assert counting.count_model_flops_per_token(shape, 2048) == 6 * 13_015_864_320 + 12 * 40 * 5120 * 2048


def test_a_tied_embedding_is_credited_once():
    untied, tied = SHAPE, replace(SHAPE, tied_embeddings=True)
    difference = counting.count_model_flops_per_token(untied, 8) - counting.count_model_flops_per_token(tied, 8)
    assert difference == 6 * SHAPE.vocab_size * SHAPE.hidden_size
