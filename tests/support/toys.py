"""Toys: models of many families of `transformers`, a few thousand weights each, and their loss and gradients."""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from dtlayout.plans.init import allocate
from dtlayout.spec.batch import IGNORED
from dtlayout.spec.kernels import Kernels
from dtlayout.tracing.building import build_model, without_dropout
from dtlayout.tracing.module import TracedModel

S, V, NUM_TARGETS = 12, 101, 7.0
SIZES = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "sliding_window": 5, "pad_token_id": None,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
"""Keys of a config that are set wherever a family has them, under its own names."""
ROTARY = {"rope_theta": 1e4, "rope_type": "default"}
TOYS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in (
        "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "vaultgemma", "phi", "phi3", "olmo",
        "olmo2", "olmo3", "smollm3", "stablelm", "glm", "glm4", "falcon", "gpt_neox", "gpt2", "bloom", "starcoder2",
        "nemotron", "ernie4_5", "seed_oss", "gpt_bigcode", "helium", "exaone4", "arcee", "persimmon",
        "hunyuan_v1_dense", "cwm", "bitnet", "biogpt", "openai-gpt", "nanochat", "diffllama", "mixtral", "qwen3_moe",
        "olmoe", "gpt_oss", "granitemoe", "llama4_text", "doge", "moshi", "jetmoe", "hunyuan_v1_moe",
    )},
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "opt with projections": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "mpt": ("mpt", {"max_seq_len": 64}),
    "gptj": ("gptj", {"rotary_dim": 4}),
    "mpt clipped": ("mpt", {"max_seq_len": 64, "attn_config": {"clip_qkv": 6.0}}),
    "falcon with alibi": ("falcon", {"alibi": True}),
    "falcon 40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "granite": ("granite", {
        "logits_scaling": 8.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
    }),
    "cohere": ("cohere", {"logit_scale": 0.3}),
    "cohere2": ("cohere2", {"logit_scale": 0.3}),
    "llama with dropout": ("llama", {"attention_dropout": 0.5, "tie_word_embeddings": True}),
}  # fmt: skip
"""Name of a toy → its family, and keys beside `SIZES`."""


def make_config(kind: str, **more: Any) -> Any:
    """The config of a family at toy size."""
    family = CONFIG_MAPPING[kind]
    known = set(family().to_dict()) | set(family.attribute_map)
    config = family(**{key: value for key, value in SIZES.items() if key in known} | more)
    config._experts_implementation = "eager"  # the other one has no float64
    return config


def build(config: Any, *, loss: str = "linear", **part: Any) -> TracedModel:
    """A model, or a part of it, with memory on the CPU."""
    with torch.device("meta"):
        model = TracedModel(config, Kernels(loss=loss), S, dtype=torch.float64, **part)
    allocate([model], "cpu")
    return model


class Answer(NamedTuple):
    """What the family's own model computes."""

    config: Any
    state: dict[str, Tensor]
    tokens: Tensor
    targets: Tensor
    logits: Tensor
    loss: float
    gradients: dict[str, Tensor]


@cache
def ask_family(name: str) -> Answer:
    """Loss and gradients of a toy by its family's own causal model, in float64 throughout."""
    kind, more = TOYS[name]
    config, generator = make_config(kind, **more), torch.Generator().manual_seed(0)
    supports_sdpa = type(build_model(config, torch.float64))._supports_sdpa
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "softmax", exact_softmax)
        model = AutoModelForCausalLM.from_config(
            without_dropout(config), dtype=torch.float64, attn_implementation="sdpa" if supports_sdpa else "eager"
        )
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3, generator=generator)
            else:
                nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
        tokens = torch.randint(2, V, (2, S), generator=generator)
        targets = torch.randint(V, (2, S), generator=generator)
        targets[0, 3] = IGNORED
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / NUM_TARGETS
        loss.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return Answer(config, model.state_dict(), tokens, targets, logits.detach(), float(loss.detach()), gradients)


_real_softmax = F.softmax


def exact_softmax(x: Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax that never rounds float64 to the fp32 that attention of some families asks for."""
    return _real_softmax(x, dim=dim, dtype=x.dtype if x.dtype == torch.float64 else dtype)


def load(model: TracedModel, state: dict[str, Tensor]) -> None:
    """Give a part of a model the weights of a family's state dict."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[model.parts.to_family(name)])


def find_difference(answer: Answer, *stages: TracedModel) -> float:
    """The largest difference of a gradient of all stages together, as a share of the largest gradient."""
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            own = stage.parts.to_family(name)
            own = own if own in answer.gradients else f"{stage.parts.embedding}.weight"  # the head of a tied model
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found[own] = found.get(own, torch.zeros_like(whole)) + whole
    assert set(found) == set(answer.gradients)
    largest = max(gradient.abs().max() for gradient in answer.gradients.values())
    return max(float((found[name] - answer.gradients[name]).abs().max() / largest) for name in found)
