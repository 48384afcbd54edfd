"""Families with code beside their weights and no class in `transformers`: parameters are those of published files."""

from typing import Any

import pytest

from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.engine import OWN_ENGINE, find_engine
from dtlayout.costmodel.engine_rules import find_training_lacks
from dtlayout.models.coded_families import CODED
from dtlayout.models.counting import count_active_parameters, count_parameters
from dtlayout.models.hf_config import parse_hf
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import Precision


def size(hidden: int, ffn: int, heads: int, layers: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads, "num_hidden_layers": layers,
        "vocab_size": vocab,
    }  # fmt: skip


PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "internlm2-7b": (7_737_708_544, {
        "model_type": "internlm2", **size(4096, 14_336, 32, 32, 92_544), "num_key_value_heads": 8, "bias": False,
        "auto_map": {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"},
    }),
    "baichuan2-7b": (7_505_973_248, {
        "model_type": "baichuan", **size(4096, 11_008, 32, 32, 125_696), "model_max_length": 4096,
        "max_position_embeddings": 4096, "architectures": ["BaichuanForCausalLM"],
    }),
    "chatglm3-6b": (6_243_584_000, {
        "model_type": "chatglm", "hidden_size": 4096, "ffn_hidden_size": 13_696, "num_attention_heads": 32,
        "num_layers": 28, "padded_vocab_size": 65_024, "kv_channels": 128, "multi_query_attention": True,
        "multi_query_group_num": 2, "add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True,
        "apply_query_key_layer_scaling": True, "apply_residual_connection_post_layernorm": False,
        "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "fp32_residual_connection": False,
        "layernorm_epsilon": 1e-05, "original_rope": True, "post_layer_norm": True, "seq_length": 8192,
        "vocab_size": 65_024,
    }),
    "glm-4-9b": (9_399_951_360, {
        "model_type": "chatglm", "hidden_size": 4096, "ffn_hidden_size": 13_696, "num_attention_heads": 32,
        "num_layers": 40, "padded_vocab_size": 151_552, "kv_channels": 128, "multi_query_attention": True,
        "multi_query_group_num": 2, "add_qkv_bias": True, "rope_ratio": 500, "layernorm_epsilon": 1.5625e-07,
    }),
    "deepseek-moe-16b": (16_375_728_128, {
        "model_type": "deepseek", **size(2048, 10_944, 16, 28, 102_400), "num_key_value_heads": 16,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax",
        "aux_loss_alpha": 0.001, "seq_aux": True, "rope_scaling": None, "pretraining_tp": 1,
    }),
    "minicpm-2b": (2_724_880_896, {
        "model_type": "minicpm", **size(2304, 5760, 36, 40, 122_753), "num_key_value_heads": 36, "scale_emb": 12,
        "dim_model_base": 256, "scale_depth": 1.4,
    }),
    "qwen-7b": (7_721_324_544, {
        "model_type": "qwen", **size(4096, 22_016, 32, 32, 151_936), "kv_channels": 128, "no_bias": True,
        "attn_dropout_prob": 0.0, "emb_dropout_prob": 0.0, "bf16": False, "fp16": False, "fp32": False,
        "layer_norm_epsilon": 1e-06, "onnx_safe": None, "rotary_emb_base": 10_000, "rotary_pct": 1.0,
        "scale_attn_weights": True, "seq_length": 8192, "use_dynamic_ntk": True, "use_flash_attn": "auto",
        "use_logn_attn": True, "use_cache": True, "tokenizer_class": "QWenTokenizer",
    }),
    "qwen-1.8b": (1_836_828_672, {"model_type": "qwen", **size(2048, 11_008, 16, 24, 151_936), "kv_channels": 128}),
}  # fmt: skip
"""Published model → the sum of its safetensors on the hub, and its config.json."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_as_many_parameters_as_its_files(name):
    number, file = PUBLISHED[name]
    assert count_parameters(parse_hf(file)) == number


def test_norms_with_biases_and_biased_attention_are_counted():
    h, f, layers, vocab = 5120, 15_360, 40, 84_608
    orion = parse_hf({"model_type": "orion", **size(h, f, 40, layers, vocab), "num_key_value_heads": 40})
    assert count_parameters(orion) == 2 * vocab * h + layers * (4 * h * h + 3 * h * f + 4 * h) + 2 * h
    h, f, layers, vocab = 4096, 11_008, 32, 103_168
    internlm = parse_hf({"model_type": "internlm", **size(h, f, 32, layers, vocab), "num_key_value_heads": None})
    assert count_parameters(internlm) == 2 * vocab * h + layers * (4 * h * h + 4 * h + 3 * h * f + 2 * h) + h


def test_a_chatglm_without_shared_heads_has_a_key_and_a_value_for_each_query():
    file = PUBLISHED["chatglm3-6b"][1]
    assert parse_hf(file).num_kv_heads == 2
    assert parse_hf(file | {"multi_query_attention": False}).num_kv_heads == 32


def test_six_of_sixty_four_experts_and_two_shared_ones_compute_a_token():
    active = count_active_parameters(parse_hf(PUBLISHED["deepseek-moe-16b"][1]))
    assert active == pytest.approx(2.8e9, rel=0.02)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("chatglm3-6b", {"rmsnorm": False}, "rmsnorm=False is not known; True is"),
        ("chatglm3-6b", {"add_bias_linear": True}, "add_bias_linear=True is not known; False is"),
        ("qwen-7b", {"no_bias": False}, "no_bias=False is not known; True is"),
        ("minicpm-2b", {"num_experts": 8}, "num_experts=8 is not known, and may change sizes"),
        ("deepseek-moe-16b", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not known; 1 is"),
    ],
)
def test_what_a_row_does_not_say_is_refused(name, changes, said):
    with pytest.raises(InvalidConfig, match=said):
        parse_hf(PUBLISHED[name][1] | changes)


@pytest.mark.parametrize("family", CODED, ids=lambda family: family.name)
def test_a_silent_file_means_the_defaults_of_its_code_and_the_reason_not_to_train_is_said(family):
    needed = {"n_routed_experts": 64, "num_experts_per_tok": 6} if family.name == "deepseek" else {}
    shape = parse_hf({"model_type": family.name, **needed})
    (line,) = find_training_lacks(find_engine(OWN_ENGINE, "cpu"), Layout(), shape, Precision())
    said = f"model.family={family.name} is planned, not trained: {family.untrained}; use a model of another family, or"
    assert line.startswith(said)
