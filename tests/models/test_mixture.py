"""Mixtures of experts: loss and gradients of transformers' models, and what a router chooses."""

import math
from dataclasses import replace

import pytest
import torch
from hf_models import in_float64
from torch import Tensor
from transformers import (
    Dots1Config,
    Dots1ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dtlayout.models.feed_forward import Mixture
from dtlayout.models.llama import Llama
from dtlayout.ops.routing import Order, choose, score, weigh
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.model_shape import Experts, ModelShape

SEQ_LEN = 24
SHAPE = ModelShape(
    name="m", hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=48, vocab_size=50, head_dim=24,
    norm_eps=1e-6, experts=Experts(number=6, per_token=2, ffn_size=48),
)  # fmt: skip
MIXTRAL = replace(SHAPE, family="mixtral")
QWEN3 = replace(SHAPE, family="qwen3_moe", qk_norm=True, experts=Experts(number=6, per_token=3, ffn_size=32))
UNNORMALIZED = replace(QWEN3, experts=Experts(number=6, per_token=3, ffn_size=32, normalized=False))
DENSE_FIRST = replace(QWEN3, experts=Experts(number=6, per_token=3, ffn_size=32, dense_layers=1))

_DOTS1 = Experts(
    number=8, per_token=3, ffn_size=16, shared_ffn_size=32, dense_layers=1, score="sigmoid", scale=2.5,
    groups=4, groups_per_token=2, correction_bias=True,
)  # fmt: skip
DOTS1 = replace(QWEN3, family="dots1", num_layers=3, experts=_DOTS1)


def build_hf(shape: ModelShape) -> PreTrainedModel:
    experts = shape.experts
    assert experts is not None
    sizes = {
        "hidden_size": shape.hidden_size, "num_hidden_layers": shape.num_layers, "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_width, "intermediate_size": shape.ffn_size,
        "vocab_size": shape.vocab_size, "rms_norm_eps": shape.norm_eps, "max_position_embeddings": SEQ_LEN,
        "num_experts_per_tok": experts.per_token, "num_local_experts": experts.number, "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attn_implementation": "eager", "experts_implementation": "eager",
    }  # fmt: skip
    if shape.family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**sizes, sliding_window=None)).double()
    if shape.family == "dots1":
        return Dots1ForCausalLM(Dots1Config(**sizes, **list_keys_of_dots1(experts))).double()
    config = Qwen3MoeConfig(
        **sizes, moe_intermediate_size=experts.ffn_size, norm_topk_prob=experts.normalized,
        mlp_only_layers=list(range(experts.dense_layers)),
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).double()


def list_keys_of_dots1(experts: Experts) -> dict[str, object]:
    return {
        "moe_intermediate_size": experts.ffn_size, "n_shared_experts": experts.shared_ffn_size // experts.ffn_size,
        "first_k_dense_replace": experts.dense_layers, "norm_topk_prob": experts.normalized, "n_group": experts.groups,
        "topk_group": experts.groups_per_token, "routed_scaling_factor": experts.scale, "sliding_window": None,
    }  # fmt: skip


def to_ours(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names and stacks of our modules: theirs hold gate and up as one."""
    ours = {}
    for name, tensor in theirs.items():
        name = name.replace("gate.e_score_correction", "correction").replace("shared_experts", "shared_expert")
        if name.endswith("experts.gate_up_proj"):
            module = name.removesuffix("gate_up_proj")
            ours[f"{module}gate_proj.weight"], ours[f"{module}up_proj.weight"] = tensor.chunk(2, 1)
        else:
            ours[f"{name}.weight" if name.endswith("experts.down_proj") else name] = tensor
    return ours


@pytest.mark.parametrize(
    "shape",
    [MIXTRAL, QWEN3, UNNORMALIZED, DENSE_FIRST, DOTS1],
    ids=["mixtral", "qwen3", "raw", "dense first", "dots1"],
)
def test_loss_and_gradients_are_those_of_transformers_in_float64(shape: ModelShape) -> None:
    torch.manual_seed(0)
    with in_float64():
        theirs = build_hf(shape)
        for name, bias in theirs.named_buffers():
            if "correction_bias" in name:
                bias.normal_()
        tokens = torch.randint(shape.vocab_size, (2, SEQ_LEN))
        expected = theirs(tokens, labels=tokens).loss
        expected.backward()
    ours = Llama(shape, Kernels(attention="sdpa-math", norm="eager"), SEQ_LEN, dtype=torch.float64)
    ours.load_state_dict(to_ours(theirs.state_dict()), strict=True)
    targets = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], 1)
    loss = ours(tokens, targets=targets, num_targets=2.0 * (SEQ_LEN - 1))
    loss.backward()
    assert abs(loss.item() / expected.item() - 1) <= 1e-10
    wanted = to_ours({name: parameter.grad for name, parameter in theirs.named_parameters()})
    trained = {name: parameter for name, parameter in ours.named_parameters() if parameter.requires_grad}
    assert trained.keys() == wanted.keys()
    for name, parameter in trained.items():
        assert float((parameter.grad - wanted[name]).norm() / wanted[name].norm()) <= 1e-10, name


def route_like_deepseek(logits: Tensor, rules: Experts, bias: Tensor) -> dict[int, dict[int, float]]:
    """Token → expert → weight, one token after the other, as DeepSeek-V3's report writes it (sec. 2.1.2)."""
    size, found = rules.number // rules.groups, {}
    for token, row in enumerate(logits.tolist()):
        scores = [1 / (1 + math.exp(-x)) for x in row]
        biased = [s + b for s, b in zip(scores, bias.tolist(), strict=True)]
        groups = [biased[first : first + size] for first in range(0, rules.number, size)]
        by_sum = sorted(range(rules.groups), key=lambda g: -sum(sorted(groups[g])[-2:]))[: rules.groups_per_token]
        open_experts = [e for e in range(rules.number) if e // size in by_sum]
        chosen = sorted(open_experts, key=lambda e: -biased[e])[: rules.per_token]
        total = sum(scores[e] for e in chosen)
        found[token] = {e: rules.scale * scores[e] / total for e in chosen}
    return found


def test_groups_and_a_bias_choose_but_do_not_weigh() -> None:
    rules = Experts(
        number=12, per_token=3, ffn_size=1, score="sigmoid", groups=4, groups_per_token=2, scale=2.5,
        correction_bias=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    logits, bias = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((50, 12), (12,)))
    scores = score(logits, rules)
    experts = choose(scores, rules, bias)
    weights = weigh(scores, experts, rules)
    expected = route_like_deepseek(logits, rules, bias)
    for token, by_expert in expected.items():
        got = dict(zip(experts[token].tolist(), weights[token].tolist(), strict=True))
        assert got == pytest.approx(by_expert, rel=1e-12)
    assert expected != route_like_deepseek(logits, rules, torch.zeros(12)), "the bias has chosen"


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_losses_of_routers_add_the_gradients_of_their_formulas(function: str) -> None:
    """Against one loss that autograd differentiates as a whole, with counts taken by hand."""
    rules = Experts(number=6, per_token=2, ffn_size=32, score=function, balance_loss=0.7, z_loss=0.3)  # type: ignore[arg-type]
    shape = replace(SHAPE, num_layers=1, experts=rules)
    torch.manual_seed(1)
    x, wanted = torch.randn(2, SEQ_LEN, 64, dtype=torch.float64), torch.randn(2, SEQ_LEN, 64, dtype=torch.float64)
    mixture = Mixture(shape, Kernels(), torch.float64)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.normal_(0, 0.3)
    mixture.counts.num_targets = 40.0
    (mixture(x) * wanted).sum().backward()
    got = mixture.gate.weight.grad.clone()
    mixture.zero_grad()
    mixture.rules = mixture.counts.rules = replace(rules, balance_loss=0, z_loss=0)
    logits = mixture.gate(x.flatten(0, 1))
    scores = logits.softmax(-1) if function == "softmax" else logits.sigmoid()
    chosen = scores.topk(2).indices
    f = torch.bincount(chosen.flatten(), minlength=6).double() / chosen.numel()
    shares = scores / scores.sum(-1, keepdim=True)
    num_tokens = len(logits)
    balance = 0.7 * 6 * (f * shares.mean(0)).sum()
    z = 0.3 * logits.exp().sum(-1).log().square().mean()
    ((mixture(x) * wanted).sum() + (balance + z) * num_tokens / 40).backward()
    torch.testing.assert_close(got, mixture.gate.weight.grad, rtol=1e-10, atol=1e-12)
    counts = mixture.counts.take()
    assert counts is not None
    torch.testing.assert_close(counts[:6], 2 * torch.bincount(chosen.flatten(), minlength=6).double())


def test_copies_come_back_to_their_tokens() -> None:
    experts = torch.tensor([[2, 0], [2, 1], [0, 2]])
    order = Order.by_expert(experts, 4)
    assert order.ends.tolist() == [2, 3, 6, 6]
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    copies = order.copy(x)
    assert torch.equal(copies, x[[0, 2, 1, 0, 1, 2]])
    assert torch.equal(order.add_up(copies), 2 * x)
    assert torch.equal(order.sort(experts), torch.tensor([0, 0, 1, 2, 2, 2]))
    torch.autograd.gradcheck(lambda x: order.add_up(order.copy(x).sin() * 3), x)
