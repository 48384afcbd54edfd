"""Counts: FLOPs are what torch's own counter sees, and MFU's convention is the study's."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dtlayout.models import counting
from dtlayout.models.llama import Llama
from dtlayout.models.presets import find_preset
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.model_shape import Experts, LatentAttention, ModelShape

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


DEEPSEEK_V3 = ModelShape(
    name="deepseek-v3", hidden_size=7168, num_layers=61, num_heads=128, num_kv_heads=128, ffn_size=18_432,
    vocab_size=129_280, head_dim=192,
    experts=Experts(number=256, per_token=8, ffn_size=2048, shared_ffn_size=2048, dense_layers=3),
    latent_attention=LatentAttention(query_rank=1536, kv_rank=512, rope_width=64, value_width=128),
)  # fmt: skip


def mixture(hidden: int, layers: int, heads: int, kv_heads: int, vocab: int, head_dim: int, **experts) -> ModelShape:
    return ModelShape(
        name="mixture", hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, ffn_size=4096,
        vocab_size=vocab, head_dim=head_dim, experts=Experts(**experts),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "billions", "active"),
    [
        # Mixtral 8x7B, arXiv:2401.04088; Qwen3, arXiv:2505.09388, sec. 2.
        (mixture(4096, 32, 32, 8, 32_000, 128, number=8, per_token=2, ffn_size=14_336), 46.7, 12.9),
        (mixture(2048, 48, 32, 4, 151_936, 128, number=128, per_token=8, ffn_size=768), 30.5, 3.3),
        (mixture(4096, 94, 64, 4, 151_936, 128, number=128, per_token=8, ffn_size=1536), 235, 22),
        # gpt-oss, arXiv:2508.10925, table 1: without biases and sinks; active is said there without the embedding.
        (mixture(2880, 36, 64, 8, 201_088, 64, number=128, per_token=4, ffn_size=2880), 116.83, 5.13 + 0.58),
        (DEEPSEEK_V3, 671, 37 + 0.9),  # arXiv:2412.19437, sec. 4.2; active without the embedding
        (mixture(2880, 24, 64, 8, 201_088, 64, number=32, per_token=4, ffn_size=2880), 20.91, 3.61 + 0.58),
    ],
)
def test_mixtures_have_as_many_parameters_as_was_published(model, billions, active):
    assert counting.count_parameters(model) / 1e9 == pytest.approx(billions, rel=2e-3)
    assert counting.count_active_parameters(model) / 1e9 == pytest.approx(active, rel=2e-2)


def test_what_computes_a_token_is_credited():
    """Two of eight experts, the shared one and the router, in the two blocks that are not dense."""
    experts = Experts(number=8, per_token=2, ffn_size=20, shared_ffn_size=12, dense_layers=1)
    difference = counting.count_active_parameters(replace(SHAPE, experts=experts)) - counting.count_parameters(SHAPE)
    assert difference == 2 * 32 * (3 * (2 * 20 + 12) + 8 - 3 * 48)
    more = replace(experts, number=16)
    flops = [counting.count_model_flops_per_token(replace(SHAPE, experts=each), 8) for each in (experts, more)]
    assert flops[1] - flops[0] == 6 * 2 * 8 * 32  # rows of the router
