"""Small models that `transformers` made and saved, one of each kind of config.json."""

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
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
}


def save_made(kind: str, folder: Path) -> Path:
    """The folder, with the weights in several files; biases and norms are random too."""
    make, config = MADE[kind]
    torch.manual_seed(5)
    model = make(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=float(parameter.dim() == 1), std=0.3)
    model.save_pretrained(folder, max_shard_size="60KB")
    return folder
