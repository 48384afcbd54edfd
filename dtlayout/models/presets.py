"""Published shapes by name; sizes as in each model's HF config.json.

A variant is a preset with something overridden: the study's models (arXiv:2311.05610) are Llama 1's with
`--model.vocab_size=128000`.
"""

from dataclasses import replace

from dtlayout.errors import InvalidConfig
from dtlayout.model_shape import ModelShape, RopeScaling


def _llama1(name: str, hidden: int, layers: int, heads: int, ffn: int) -> ModelShape:
    return ModelShape(
        name=name, hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=heads, ffn_size=ffn,
        vocab_size=32_000, norm_eps=1e-6,
    )  # fmt: skip


def _llama3(name: str, hidden: int, layers: int, heads: int, ffn: int, *, factor: float, tied: bool) -> ModelShape:
    scaling = RopeScaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    return ModelShape(
        name=name, hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=8, ffn_size=ffn,
        vocab_size=128_256, tied_embeddings=tied, rope_theta=500_000.0, rope_scaling=scaling,
    )  # fmt: skip


def _qwen2(
    name: str, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, *, eps: float,
    tied: bool = False,
) -> ModelShape:  # fmt: skip
    return ModelShape(
        name=name, family="qwen2", hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads,
        ffn_size=ffn, vocab_size=vocab, qkv_bias=True, tied_embeddings=tied, rope_theta=1e6, norm_eps=eps,
    )  # fmt: skip


def _qwen3(name: str, hidden: int, layers: int, heads: int, ffn: int, *, tied: bool = False) -> ModelShape:
    return ModelShape(
        name=name, family="qwen3", hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=8,
        head_dim=128, ffn_size=ffn, vocab_size=151_936, qk_norm=True, tied_embeddings=tied, rope_theta=1e6,
        norm_eps=1e-6,
    )  # fmt: skip


_LLAMA_7B = _llama1("llama-7b", 4096, 32, 32, 11_008)
_LLAMA_13B = _llama1("llama-13b", 5120, 40, 40, 13_824)

_SHAPES = (
    ModelShape(name="debug", hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, ffn_size=384, vocab_size=264),
    _LLAMA_7B,
    _LLAMA_13B,
    _llama1("llama-30b", 6656, 60, 52, 17_920),
    _llama1("llama-65b", 8192, 80, 64, 22_016),
    replace(_LLAMA_7B, name="llama2-7b", norm_eps=1e-5),
    replace(_LLAMA_13B, name="llama2-13b", norm_eps=1e-5),
    ModelShape(name="llama2-70b", hidden_size=8192, num_layers=80, num_heads=64, num_kv_heads=8, ffn_size=28_672,
               vocab_size=32_000),
    _llama3("llama3.1-8b", 4096, 32, 32, 14_336, factor=8.0, tied=False),
    _llama3("llama3.1-70b", 8192, 80, 64, 28_672, factor=8.0, tied=False),
    _llama3("llama3.1-405b", 16_384, 126, 128, 53_248, factor=8.0, tied=False),
    _llama3("llama3.2-1b", 2048, 16, 32, 8192, factor=32.0, tied=True),
    _llama3("llama3.2-3b", 3072, 28, 24, 8192, factor=32.0, tied=True),
    _qwen2("qwen2.5-0.5b", 896, 24, 14, 2, 4864, 151_936, eps=1e-6, tied=True),
    _qwen2("qwen2.5-1.5b", 1536, 28, 12, 2, 8960, 151_936, eps=1e-6, tied=True),
    _qwen2("qwen2.5-3b", 2048, 36, 16, 2, 11_008, 151_936, eps=1e-6, tied=True),
    _qwen2("qwen2.5-7b", 3584, 28, 28, 4, 18_944, 152_064, eps=1e-6),
    _qwen2("qwen2.5-14b", 5120, 48, 40, 8, 13_824, 152_064, eps=1e-5),
    _qwen2("qwen2.5-32b", 5120, 64, 40, 8, 27_648, 152_064, eps=1e-5),
    _qwen2("qwen2.5-72b", 8192, 80, 64, 8, 29_568, 152_064, eps=1e-5),
    _qwen3("qwen3-0.6b", 1024, 28, 16, 3072, tied=True),
    _qwen3("qwen3-1.7b", 2048, 28, 16, 6144, tied=True),
    _qwen3("qwen3-4b", 2560, 36, 32, 9728, tied=True),
    _qwen3("qwen3-8b", 4096, 36, 32, 12_288),
    _qwen3("qwen3-14b", 5120, 40, 40, 17_408),
    _qwen3("qwen3-32b", 5120, 64, 64, 25_600),
)  # fmt: skip

PRESETS: dict[str, ModelShape] = {shape.name: shape for shape in _SHAPES}


def find_preset(name: str) -> ModelShape:
    """The preset called `name`; InvalidConfig names them all if there is none."""
    if name not in PRESETS:
        raise InvalidConfig(f"model {name!r} is not a preset; use one of {', '.join(PRESETS)}")
    return PRESETS[name]
