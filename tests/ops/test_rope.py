"""Rotary positions: rotations that know only distances, stretched by Llama 3's rule."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from liger import compare, needs_liger
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dtlayout.models.presets import PRESETS, find_preset
from dtlayout.ops.rope import (
    RotaryEmbedding,
    apply_rope,
    eager_rope,
    liger_rope,
    rotary_frequencies,
    stretch_frequencies,
)
from dtlayout.spec.model_shape import ModelShape, RopeScaling

SHAPE = ModelShape(name="m", hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, ffn_size=8, vocab_size=8)
POSITIONS = 64
ROTARY = RotaryEmbedding(SHAPE, POSITIONS, torch.float64)


def rotate(vector: torch.Tensor, position: int) -> torch.Tensor:
    """One vector [K] at one position."""
    sequence = vector.expand(1, 1, position + 1, -1)
    return apply_rope(sequence, ROTARY.cos, ROTARY.sin)[0, 0, -1]


def random_vectors(seed: int) -> torch.Tensor:
    return torch.randn(2, SHAPE.head_width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(st.integers(0, 31), st.integers(0, 31), st.integers(0, 32), st.integers(0, 99))
def test_a_score_depends_on_the_distance_alone(query_at, key_at, shift, seed):
    q, k = random_vectors(seed)
    here = rotate(q, query_at) @ rotate(k, key_at)
    there = rotate(q, query_at + shift) @ rotate(k, key_at + shift)
    torch.testing.assert_close(there, here, rtol=0, atol=1e-12)


@settings(deadline=None)
@given(st.integers(0, POSITIONS - 1), st.integers(0, 99))
def test_a_rotation_keeps_the_length_and_position_0_keeps_all(position, seed):
    q, _ = random_vectors(seed)
    torch.testing.assert_close(rotate(q, position).norm(), q.norm())
    assert torch.equal(rotate(q, 0), q)


def test_distances_differ():
    q, k = random_vectors(0)
    scores = torch.stack([rotate(q, 0) @ rotate(k, distance) for distance in range(20)])
    assert scores.unique().numel() == 20


@pytest.mark.parametrize("name", PRESETS)
def test_frequencies_are_those_of_hf(name):
    shape = find_preset(name)
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if scaling := shape.rope_scaling:
        rope = {
            **rope,
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    config = LlamaConfig(
        hidden_size=shape.hidden_size, num_attention_heads=shape.num_heads, rope_parameters=rope,
    )  # fmt: skip
    if shape.rope_scaling:
        expected, factor = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        assert factor == 1
    else:
        exponents = torch.arange(0, shape.head_width, 2).float() / shape.head_width
        expected = 1 / shape.rope_theta**exponents
    torch.testing.assert_close(rotary_frequencies(shape).float(), expected, rtol=2e-6, atol=0)


@given(st.floats(1.5, 64), st.floats(0.5, 2), st.floats(2.5, 8), st.integers(256, 16384))
def test_long_wavelengths_are_stretched_in_full_and_short_ones_not_at_all(factor, low, high, context):
    scaling = RopeScaling(factor=factor, low_freq_factor=low, high_freq_factor=high, original_context=context)
    frequencies = torch.logspace(-7, 0, 50, dtype=torch.float64)
    wavelengths = 2 * torch.pi / frequencies
    ratio = frequencies / stretch_frequencies(frequencies, scaling)
    long, short = wavelengths > context / low, wavelengths < context / high
    torch.testing.assert_close(ratio[long], torch.full_like(ratio[long], factor))
    torch.testing.assert_close(ratio[short], torch.ones_like(ratio[short]))
    assert ((ratio >= 1 - 1e-12) & (ratio <= factor * (1 + 1e-12))).all()
    assert (ratio.diff() <= 1e-12).all()  # the shorter the wavelength, the less it is stretched


def test_tables_are_never_coarser_than_float32_and_results_have_the_input_dtype():
    rotary = RotaryEmbedding(SHAPE, POSITIONS, torch.bfloat16)
    assert rotary.cos.dtype == rotary.sin.dtype == torch.float32
    x = torch.randn(1, 2, 5, SHAPE.head_width).bfloat16()
    assert apply_rope(x, rotary.cos, rotary.sin).dtype == torch.bfloat16


def test_tables_built_on_the_meta_device_are_filled_when_they_get_memory():
    with torch.device("meta"):
        rotary = RotaryEmbedding(replace(SHAPE, rope_theta=100.0), POSITIONS, torch.float64)
    assert rotary.cos.is_meta
    rotary.to_empty(device="cpu")
    rotary.reset_buffers()
    expected = RotaryEmbedding(replace(SHAPE, rope_theta=100.0), POSITIONS, torch.float64)
    assert torch.equal(rotary.cos, expected.cos)
    assert torch.equal(rotary.sin, expected.sin)


def test_queries_and_keys_are_rotated_alike_and_gradients_are_rotated_back():
    q, k = (torch.randn(2, heads, 9, SHAPE.head_width, dtype=torch.float64, requires_grad=True) for heads in (4, 2))
    outputs = eager_rope(q, k, ROTARY.cos, ROTARY.sin)
    for x, rotated in zip((q, k), outputs, strict=True):
        assert torch.equal(rotated, apply_rope(x, ROTARY.cos, ROTARY.sin))
        (gradient,) = torch.autograd.grad(rotated, x, rotated.detach())
        torch.testing.assert_close(gradient, x.detach(), rtol=1e-12, atol=1e-12)  # a rotation's transpose undoes it


@needs_liger
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ligers_is_the_rotation_on_cuda_and_leaves_its_inputs_alone(dtype):
    rotary = RotaryEmbedding(SHAPE, POSITIONS, torch.float32)
    tables = rotary.cos.cuda(), rotary.sin.cuda()
    inputs = [torch.randn(2, 9, heads, SHAPE.head_width).transpose(1, 2) for heads in (4, 2)]
    compare(
        lambda q, k: liger_rope(q, k, *tables),
        lambda q, k: eager_rope(q, k, rotary.cos.double(), rotary.sin.double()),
        inputs,
        dtype,
    )
