"""Small models that `transformers` made and saved, one of each kind of config.json."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 48, "vocab_size": 260, "max_position_embeddings": 64,
}  # fmt: skip
STRETCHED = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
MADE: dict[str, tuple[type, PretrainedConfig]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "gqa": (LlamaForCausalLM, LlamaConfig(**SIZES | {"num_attention_heads": 8}, head_dim=4)),
    "llama3": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=STRETCHED, tie_word_embeddings=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=6)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, head_dim=6, sliding_window=None)),
}
OF_BLOCKS = SIZES | {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
"""Sizes of which a quantized base has whole blocks, also where two ranks share them."""
_ROUTED = SIZES | {"num_experts_per_tok": 2, "experts_implementation": "eager"}
_OF_QWEN = {"num_experts": 8, "moe_intermediate_size": 12, "head_dim": 6, "mlp_only_layers": [0]}
MIXTURES: dict[str, tuple[type, PretrainedConfig]] = {
    "mixtral": (MixtralForCausalLM, MixtralConfig(**_ROUTED, num_local_experts=4)),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**_ROUTED, **_OF_QWEN, output_router_logits=True)),
    "hub's qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**_ROUTED, **_OF_QWEN, norm_topk_prob=True)),
    "dots1": (
        Dots1ForCausalLM,
        Dots1Config(
            **_ROUTED, n_routed_experts=8, moe_intermediate_size=12, n_shared_experts=2, first_k_dense_replace=1,
            n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5, sliding_window=None,
        ),
    ),
}  # fmt: skip
"""Mixtures of experts; the third is saved as older versions did, with the keys that folders of the hub have."""


def save_made(kind: str, folder: Path) -> Path:
    """The folder, with the weights in several files; biases and norms are random too."""
    make, config = (MADE | MIXTURES)[kind]
    torch.manual_seed(5)
    model = make(config)
    with torch.no_grad():
        counters = (buffer for name, buffer in model.named_buffers() if "correction_bias" in name)
        for values in (*model.parameters(), *counters):
            values.normal_(mean=float(values.dim() == 1), std=0.3)
    model.save_pretrained(folder, max_shard_size="60KB")
    if kind.startswith("hub's"):
        file = folder / "config.json"
        said = json.loads(file.read_text())
        said |= {"num_experts": said.pop("num_local_experts"), "torch_dtype": said.pop("dtype")}
        said |= {"rope_theta": said.pop("rope_parameters")["rope_theta"], "rope_scaling": None, "max_window_layers": 4}
        file.write_text(json.dumps(said))
    return folder


def open_made(folder: Path) -> torch.nn.Module:
    """The model that `transformers` makes of a folder, in float32; its experts are a loop."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()


def read_by_transformers(folder: Path) -> dict[str, Tensor]:
    """Weights of a mixture of experts as `transformers` reads them, under our names; gate comes before up there."""
    found = {}
    for name, tensor in open_made(folder).state_dict().items():
        experts, is_opening, _ = name.partition("gate_up_proj")
        if is_opening:
            gate, up = tensor.chunk(2, dim=1)
            found |= {f"{experts}gate_proj.weight": gate, f"{experts}up_proj.weight": up}
        else:
            name = name.replace("experts.down_proj", "experts.down_proj.weight").replace("weight.weight", "weight")
            name = name.replace("shared_experts", "shared_expert").replace("gate.e_score_correction", "correction")
            found[name] = tensor
    return found


@contextmanager
def in_float64() -> Iterator[None]:
    """Whatever asks torch for float32 gets float64: transformers' norms, routers and rotary embeddings do."""
    patches = [mock.patch.object(torch, name, torch.float64) for name in ("float", "float32")]
    patches.append(mock.patch.object(Tensor, "float", Tensor.double))
    with patches[0], patches[1], patches[2]:
        yield
