"""Families whose code is published beside their weights, and which `transformers` does not build. No torch.

They are planned as those of `models.planned_families` are, by sizes alone. That code is never run, so nobody can hold
these rows against it; tests/models/test_coded_families.py holds them against the parameters of published files.
"""

from dataclasses import replace

from dtlayout.models.family import Derived, Family
from dtlayout.models.planned_keys import BIASES, DEEPSEEK_EXPERTS, size_model

_JOINED = "its weights of q, k and v are one matrix"
_ELSEWHERE = "transformers does not build it"


def _count_shared_heads(is_shared: bool, number: int, num_heads: int) -> int:
    """Heads of keys and values of a ChatGLM, whose file names them even where all heads have their own."""
    return number if is_shared else num_heads


_ROWS = (
    Family(
        name="internlm2", architecture="InternLM2ForCausalLM", untrained=_JOINED,
        keys={"qkv_bias": "bias", "block.output_bias": "bias"},
        defaults=size_model(128_512, 4096, 10_240, 48, 32, 2) | {"rms_norm_eps": 1e-05, "bias": False},
    ),
    Family(
        name="internlm", architecture="InternLMForCausalLM", untrained=_ELSEWHERE,
        keys={"qkv_bias": "bias", "block.output_bias": "bias"},
        defaults=size_model(103_168, 4096, 11_008, 32, 32) | {"bias": True},
    ),
    Family(
        name="baichuan", architecture="BaichuanForCausalLM", untrained=_JOINED,
        defaults=size_model(125_696, 4096, 11_008, 32, 32),
    ),
    Family(
        name="chatglm", architecture="ChatGLMModel", untrained=_JOINED,
        allowed={"rmsnorm": (True,), "add_bias_linear": (False,), "post_layer_norm": (True,)},
        ignored_keys=("bias_dropout_fusion", "original_rope", "rope_ratio"),
        keys={"num_layers": "num_layers", "ffn_size": "ffn_hidden_size", "vocab_size": "padded_vocab_size",
            "head_dim": "kv_channels", "norm_eps": "layernorm_epsilon", "qkv_bias": "add_qkv_bias",
            "num_kv_heads": Derived(("multi_query_attention", "multi_query_group_num", "num_attention_heads"),
                _count_shared_heads)},
        defaults={"padded_vocab_size": 65_024, "hidden_size": 4096, "ffn_hidden_size": 13_696, "num_layers": 28,
            "num_attention_heads": 32, "kv_channels": 128, "layernorm_epsilon": 1e-05, "add_qkv_bias": False,
            "multi_query_attention": False, "multi_query_group_num": 1},
    ),
    Family(
        name="deepseek", architecture="DeepseekForCausalLM", untrained=_ELSEWHERE,
        allowed={"moe_layer_freq": (1,)},
        keys={**BIASES, **DEEPSEEK_EXPERTS},
        defaults=size_model(102_400, 4096, 11_008, 30, 32, 32) | {"attention_bias": False, "n_routed_experts": None,
            "n_shared_experts": None, "num_experts_per_tok": None, "moe_intermediate_size": 1407,
            "first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    ),
    Family(
        name="minicpm", architecture="MiniCPMForCausalLM",
        untrained="it multiplies embeddings, branches and logits by factors",
        keys=BIASES,
        defaults=size_model(122_753, 2304, 5760, 40, 36) | {"rms_norm_eps": 1e-05, "tie_word_embeddings": True,
            "attention_bias": False},
    ),
    Family(
        name="orion", architecture="OrionForCausalLM", untrained="its norms add biases",
        traits={"block": {"norm_weights": "factor-and-bias"}},
        keys=BIASES,
        defaults=size_model(84_608, 4096, 15_360, 40, 40, 40) | {"rms_norm_eps": 1e-05, "attention_bias": False},
    ),
    Family(
        name="qwen", architecture="QWenLMHeadModel", untrained=_JOINED,
        traits={"qkv_bias": True}, allowed={"no_bias": (True,)},
        keys={"ffn_size": Derived(("intermediate_size",), lambda width: width // 2), "head_dim": "kv_channels",
            "norm_eps": "layer_norm_epsilon", "rope_theta": "rotary_emb_base"},
        ignored_keys=("rotary_pct",),
        defaults=size_model(151_936, 4096, 22_016, 32, 32) | {"kv_channels": 128, "layer_norm_epsilon": 1e-06},
    ),
)  # fmt: skip
CODED: tuple[Family, ...] = tuple(replace(each, has_class=False) for each in _ROWS)
"""Families of code of their own, with the defaults of that code."""
