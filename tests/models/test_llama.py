"""Llama: HF's model number for number, and the sum of its parts."""

from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import pytest
import torch
from hf_models import in_float64
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dtlayout.data.samples import find_starts
from dtlayout.models.llama import Llama
from dtlayout.ops.documents import Documents
from dtlayout.spec.batch import IGNORED
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.model_shape import ModelShape, RopeScaling

SHAPE = ModelShape(name="m", hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=4, ffn_size=96, vocab_size=50)
GQA = replace(SHAPE, num_kv_heads=2)
STRETCHED = replace(
    GQA,
    tied_embeddings=True,
    rope_theta=5e5,
    norm_eps=1e-6,
    rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16),
)
QWEN2 = replace(GQA, family="qwen2", qkv_bias=True, tied_embeddings=True)
QWEN3 = replace(GQA, family="qwen3", qk_norm=True, head_dim=24)
SHAPES = {
    "mha": SHAPE, "gqa": GQA, "tied": replace(GQA, tied_embeddings=True), "llama3": STRETCHED,
    "qwen2": QWEN2, "qwen3": QWEN3, "tied qwen3": replace(QWEN3, tied_embeddings=True),
    "mistral": replace(GQA, family="mistral", head_dim=24),
}  # fmt: skip
HF = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (partial(MistralConfig, sliding_window=None), MistralForCausalLM),
}
ALL_KERNELS = [Kernels(attention=a, norm=n) for a, n in product(("sdpa-flash", "sdpa-math"), ("eager", "fused"))]
SEQ_LEN = 40


def build_hf(shape: ModelShape) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if scaling := shape.rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    make_config, model = HF[shape.family]
    config = make_config(
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_width,
        intermediate_size=shape.ffn_size,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tied_embeddings,
        rms_norm_eps=shape.norm_eps,
        rope_parameters=rope,
        max_position_embeddings=SEQ_LEN,
        initializer_range=0.2,
        attn_implementation="eager",
    )
    built = model(config)
    for parameter in built.parameters():
        if parameter.dim() == 1:  # norms start as 1 and biases as 0, which would hide what is done with them
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return built


def build(shape: ModelShape = GQA, kernels: Kernels = ALL_KERNELS[0], dtype=torch.float64, **part) -> Llama:
    """A model or a part of it, with the same weights for the same names."""
    model = Llama(shape, kernels, SEQ_LEN, dtype=dtype, **part)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            seed = sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31
            parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(seed))
    return model


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(SHAPE.vocab_size, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kernels", ALL_KERNELS, ids=lambda k: f"{k.attention}-{k.norm}")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_are_those_of_hf_with_the_same_state_dict(shape, kernels, tokens):
    torch.manual_seed(0)
    theirs = build_hf(shape)
    ours = Llama(shape, kernels, SEQ_LEN)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    with torch.no_grad():
        expected, got = theirs(tokens).logits, ours(tokens)
    assert expected.std() > 0.5
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_loss_and_gradients_are_those_of_transformers_in_float64(family, tokens):
    torch.manual_seed(0)
    shape = replace(GQA, family=family, head_dim=24)
    with in_float64():
        theirs = build_hf(shape).double()
        expected = theirs(tokens, labels=tokens).loss
        expected.backward()
    ours = Llama(shape, Kernels(attention="sdpa-math", norm="eager"), SEQ_LEN, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    targets = torch.cat([tokens[:, 1:], torch.full((2, 1), IGNORED)], 1)
    loss = ours(tokens, targets=targets, num_targets=2.0 * (SEQ_LEN - 1))
    loss.backward()
    assert expected.item() > 1
    assert abs(loss.item() - expected.item()) < 1e-10
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_state_dict_is_that_of_hf_and_holds_no_rope_tables(shape):
    ours, theirs = Llama(shape, Kernels(), SEQ_LEN).state_dict(), build_hf(shape).state_dict()
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}


@pytest.mark.parametrize("cuts", [(1,), (2,), (1, 2)])
@pytest.mark.parametrize("shape", [GQA, STRETCHED], ids=["untied", "tied"])
def test_parts_in_a_row_compute_exactly_what_the_whole_does(shape, cuts, tokens):
    whole, x = build(shape), tokens
    edges = [0, *cuts, shape.num_layers]
    names: list[str] = []
    for i, (start, end) in enumerate(pairwise(edges)):
        is_last = i == len(cuts)
        part = build(shape, layers=range(start, end), embedding=i == 0, head=is_last)
        part.load_state_dict({name: whole.state_dict()[name] for name in part.state_dict()})
        names += part.state_dict()
        x = part(x)
        if not is_last:
            assert x.shape == (*tokens.shape, shape.hidden_size)
    assert torch.equal(x, whole(tokens))
    assert sorted(names) == sorted(whole.state_dict())


def test_tied_embeddings_are_one_parameter():
    tied, untied = build(STRETCHED), build(GQA)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_the_loss_is_the_cross_entropy_of_valid_targets_over_those_of_the_whole_step(tokens):
    model, targets = build(), tokens.roll(-1, dims=1)
    targets[0, 5:] = IGNORED
    flat = model(tokens).flatten(0, 1)
    summed = model(tokens, targets=targets)
    torch.testing.assert_close(summed, F.cross_entropy(flat, targets.flatten(), reduction="sum"))
    num_valid = (targets != IGNORED).sum()
    mean = model(tokens, targets=targets, num_targets=num_valid)
    torch.testing.assert_close(mean, F.cross_entropy(flat, targets.flatten()))
    assert mean.dim() == 0


@pytest.mark.parametrize("kernels", ALL_KERNELS, ids=lambda k: f"{k.attention}-{k.norm}")
def test_float64_stays_float64_through_the_whole_model(kernels, tokens):
    model = build(STRETCHED, kernels)
    seen = set()
    for part in model.modules():
        part.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    loss = model(tokens, targets=tokens)
    loss.backward()
    assert seen | {loss.dtype} | {p.grad.dtype for p in model.parameters()} == {torch.float64}


@pytest.mark.parametrize("kernels", ALL_KERNELS[1:], ids=lambda k: f"{k.attention}-{k.norm}")
def test_every_kernel_computes_the_same_in_float64(kernels, tokens):
    torch.testing.assert_close(build(GQA, kernels)(tokens), build(GQA)(tokens), rtol=1e-11, atol=1e-11)


def test_a_token_sees_only_the_tokens_before_it(tokens):
    changed = tokens.clone()
    changed[:, 25:] = (changed[:, 25:] + 1) % SHAPE.vocab_size
    before, after = build()(tokens), build()(changed)
    assert torch.equal(before[:, :25], after[:, :25])
    assert not torch.isclose(before[:, 25:], after[:, 25:]).all(-1).any()


@pytest.mark.parametrize("kernels", ALL_KERNELS[::2], ids=lambda k: k.attention)
def test_the_loss_with_documents_is_that_of_each_document_computed_alone(kernels, tokens):
    """Their positions count on from what is before them, which rotary embeddings do not see."""
    model, targets, end = build(GQA, kernels), tokens.roll(-1, dims=1), 3
    tokens[0, [4, 5, 30]] = tokens[1, 0] = tokens[1, -1] = end
    alone, num_documents = 0.0, 0
    for row, wanted in zip(tokens, targets, strict=True):
        ends = [i + 1 for i, token in enumerate(row.tolist()) if token == end]
        for first, last in pairwise(sorted({0, *ends, SEQ_LEN})):
            alone += model(row[None, first:last], targets=wanted[None, first:last])
            num_documents += 1
    documents = Documents.from_starts(find_starts(tokens == end))
    together = model(tokens, documents, targets=targets)
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)
    assert num_documents >= 6 and not torch.isclose(together, model(tokens, targets=targets), rtol=1e-4)


def test_a_shorter_sequence_is_a_prefix(tokens):
    torch.testing.assert_close(build()(tokens[:, :7]), build()(tokens)[:, :7])
