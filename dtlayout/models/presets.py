"""Published shapes by name; sizes as in each model's HF config.json.

A variant is a preset with something overridden: the study's models (arXiv:2311.05610) are Llama 1's with
`--model.vocab_size=128000`.
"""

from dataclasses import replace
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.spec.model_shape import Experts, ModelShape, RopeScaling

_ROPE = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
_LLAMA1 = {"vocab_size": 32_000, "norm_eps": 1e-6}
_LLAMA2 = {"vocab_size": 32_000}
_LLAMA31 = {"vocab_size": 128_256, "rope_theta": 500_000.0, "rope_scaling": _ROPE}
_LLAMA32 = _LLAMA31 | {"rope_scaling": replace(_ROPE, factor=32.0), "tied_embeddings": True}
_QWEN25 = {"family": "qwen2", "vocab_size": 152_064, "qkv_bias": True, "rope_theta": 1e6}
_QWEN25_SMALL = _QWEN25 | {"vocab_size": 151_936, "norm_eps": 1e-6, "tied_embeddings": True}
_QWEN3 = {
    "family": "qwen3", "head_dim": 128, "vocab_size": 151_936, "qk_norm": True, "rope_theta": 1e6, "norm_eps": 1e-6,
}  # fmt: skip
_QWEN3_SMALL = _QWEN3 | {"tied_embeddings": True}
_MIXTRAL = {"family": "mixtral", "vocab_size": 32_000, "rope_theta": 1e6}
_QWEN3_MOE = _QWEN3 | {"family": "qwen3_moe"}
_EXPERTS_DOTS1 = Experts(
    number=128, per_token=6, ffn_size=1408, shared_ffn_size=2816, dense_layers=1, score="sigmoid", scale=2.5,
    correction_bias=True,
)  # fmt: skip
_DOTS1 = {"family": "dots1", "vocab_size": 152_064, "qk_norm": True, "rope_theta": 1e7}

_SIZES: tuple[tuple[str, int, int, int, int, int, dict[str, Any]], ...] = (
    # name, hidden_size, num_layers, num_heads, num_kv_heads, ffn_size, and what its series has in common
    ("debug", 128, 4, 4, 2, 384, {"vocab_size": 264}),
    ("llama-7b", 4096, 32, 32, 32, 11_008, _LLAMA1),
    ("llama-13b", 5120, 40, 40, 40, 13_824, _LLAMA1),
    ("llama-30b", 6656, 60, 52, 52, 17_920, _LLAMA1),
    ("llama-65b", 8192, 80, 64, 64, 22_016, _LLAMA1),
    ("llama2-7b", 4096, 32, 32, 32, 11_008, _LLAMA2),
    ("llama2-13b", 5120, 40, 40, 40, 13_824, _LLAMA2),
    ("llama2-70b", 8192, 80, 64, 8, 28_672, _LLAMA2),
    ("llama3.1-8b", 4096, 32, 32, 8, 14_336, _LLAMA31),
    ("llama3.1-70b", 8192, 80, 64, 8, 28_672, _LLAMA31),
    ("llama3.1-405b", 16_384, 126, 128, 8, 53_248, _LLAMA31),
    ("llama3.2-1b", 2048, 16, 32, 8, 8192, _LLAMA32),
    ("llama3.2-3b", 3072, 28, 24, 8, 8192, _LLAMA32),
    ("qwen2.5-0.5b", 896, 24, 14, 2, 4864, _QWEN25_SMALL),
    ("qwen2.5-1.5b", 1536, 28, 12, 2, 8960, _QWEN25_SMALL),
    ("qwen2.5-3b", 2048, 36, 16, 2, 11_008, _QWEN25_SMALL),
    ("qwen2.5-7b", 3584, 28, 28, 4, 18_944, _QWEN25 | {"norm_eps": 1e-6}),
    ("qwen2.5-14b", 5120, 48, 40, 8, 13_824, _QWEN25),
    ("qwen2.5-32b", 5120, 64, 40, 8, 27_648, _QWEN25),
    ("qwen2.5-72b", 8192, 80, 64, 8, 29_568, _QWEN25),
    ("qwen3-0.6b", 1024, 28, 16, 8, 3072, _QWEN3_SMALL),
    ("qwen3-1.7b", 2048, 28, 16, 8, 6144, _QWEN3_SMALL),
    ("qwen3-4b", 2560, 36, 32, 8, 9728, _QWEN3_SMALL),
    ("qwen3-8b", 4096, 36, 32, 8, 12_288, _QWEN3),
    ("qwen3-14b", 5120, 40, 40, 8, 17_408, _QWEN3),
    ("qwen3-32b", 5120, 64, 64, 8, 25_600, _QWEN3),
    ("mixtral-8x7b", 4096, 32, 32, 8, 14_336, _MIXTRAL | {"experts": Experts(number=8, per_token=2, ffn_size=14_336)}),
    ("qwen3-30b-a3b", 2048, 48, 32, 4, 6144, _QWEN3_MOE | {"experts": Experts(number=128, per_token=8, ffn_size=768)}),
    (
        "qwen3-235b-a22b",
        4096,
        94,
        64,
        4,
        12_288,
        _QWEN3_MOE | {"experts": Experts(number=128, per_token=8, ffn_size=1536)},
    ),
    ("dots.llm1", 4096, 62, 32, 32, 10_944, _DOTS1 | {"experts": _EXPERTS_DOTS1}),
)

PRESETS: dict[str, ModelShape] = {
    name: ModelShape(
        name=name, hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, ffn_size=ffn, **series
    )
    for name, hidden, layers, heads, kv_heads, ffn, series in _SIZES
}  # fmt: skip


def find_preset(name: str) -> ModelShape:
    """The preset called `name`; InvalidConfig names all presets if there is none."""
    if name not in PRESETS:
        raise InvalidConfig(f"model {name!r} is not a preset; use one of {', '.join(PRESETS)}")
    return PRESETS[name]
