"""Families: their config.json makes their presets, and descriptions are those of the modules."""

import pkgutil
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import Dots1Config, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.beside import update_config
from dtlayout.models.description import BLOCKS
from dtlayout.models.families import FAMILIES, Family, describe, find_family, find_weight, register_family
from dtlayout.models.hf_config import parse_hf
from dtlayout.models.presets import PRESETS, find_preset
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.kernels import Kernels

SHAPES = {
    **{
        name: next((s for s in PRESETS.values() if s.family == name), replace(find_preset("debug"), family=name))
        for name, family in FAMILIES.items()
        if not family.untrained
    },
    "tied": find_preset("llama3.2-1b"),
    "untied qwen3": find_preset("qwen3-8b"),
    "lora": replace(find_preset("qwen2.5-0.5b"), adapter=Adapter(rank=4)),
    "ia3": replace(find_preset("debug"), adapter=Adapter(method="ia3", targets=("q_proj", "o_proj", "down_proj"))),
}


def build(shape) -> nn.Module:
    with torch.device("meta"):
        return pkgutil.resolve_name(find_family(shape.family).module)(shape, Kernels(), 8)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_description_has_the_parameters_of_the_modules(shape):
    parameters = {name: tuple(p.shape) for name, p in build(shape).named_parameters(remove_duplicate=False)}
    description = describe(shape)
    prefix = BLOCKS.rstrip("*")
    ends = (description.embedding, *description.final_norm.weights, description.head)
    described = {weight.name: weight.shape for weight in ends} | {
        f"{prefix}{layer}.{weight.name}": weight.shape
        for layer in range(shape.num_layers) for weight in describe(shape.kind_of(layer)).block_weights
    }  # fmt: skip
    assert described == parameters
    assert all(find_weight(shape, name).shape == size for name, size in parameters.items())


def test_a_name_that_no_weight_has_is_not_found():
    for name in ("model.layers.0.mlp.gate", "model.norm", "layers.0.mlp.gate_proj.weight"):
        with pytest.raises(KeyError):
            describe(SHAPES["llama"]).find(name)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("qwen2.5-7b", Qwen2Config(hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, vocab_size=152_064,
                                   num_key_value_heads=4, intermediate_size=18_944, tie_word_embeddings=False)),
        ("qwen3-0.6b", Qwen3Config(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, vocab_size=151_936,
                                   num_key_value_heads=8, intermediate_size=3072, tie_word_embeddings=True,
                                   head_dim=128)),
        ("mixtral-8x7b", MixtralConfig(max_position_embeddings=32_768, router_aux_loss_coef=0.02)),
        ("qwen3-30b-a3b", Qwen3MoeConfig(hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, head_dim=128,
                                         num_key_value_heads=4, intermediate_size=6144, moe_intermediate_size=768,
                                         num_experts=128, num_experts_per_tok=8, norm_topk_prob=True)),
        ("qwen3-235b-a22b", Qwen3MoeConfig(hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, head_dim=128,
                                           num_key_value_heads=4, intermediate_size=12_288, num_experts=128,
                                           moe_intermediate_size=1536, num_experts_per_tok=8, norm_topk_prob=True)),
        ("dots.llm1", Dots1Config(hidden_size=4096, n_routed_experts=128, n_shared_experts=2, num_experts_per_tok=6,
                                  first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5,
                                  rms_norm_eps=1e-5)),
    ],
)  # fmt: skip
def test_a_config_json_of_each_family_makes_its_preset(name, config):
    written = config.to_dict() | {
        "rope_parameters": {"rope_type": "default", "rope_theta": find_preset(name).rope_theta}
    }
    assert parse_hf(written, name) == find_preset(name)


PUBLISHED: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32000,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "dots.llm1": {
        "architectures": ["Dots1ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "eos_token_id": 151643, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 32768, "model_type": "dots1",
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6,
        "num_hidden_layers": 62, "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 10000000, "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc", "sliding_window": None,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "use_cache": True, "vocab_size": 152064,
    },
}  # fmt: skip
"""Preset → its config.json as published, with keys that older versions of `transformers` wrote."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_json_makes_its_preset_and_stays_as_it_is(name):
    assert parse_hf(PUBLISHED[name], name) == find_preset(name)
    assert update_config(PUBLISHED[name], find_preset(name), "bfloat16", None) == PUBLISHED[name]


def test_a_head_width_that_follows_from_the_others_is_not_written_down():
    shape = parse_hf({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
                      "vocab_size": 8, "intermediate_size": 8, "head_dim": 16})  # fmt: skip
    assert shape.head_dim is None and shape.head_width == 16


def test_a_preset_is_spelt_like_its_config_json():
    assert find_preset("qwen3-8b").head_dim is None and find_preset("qwen3-4b").head_dim == 128


def test_an_unknown_family_is_refused_with_all_that_exist():
    with pytest.raises(InvalidConfig, match=r"model\.family='gpt' is not known; use one of llama, qwen2, qwen3"):
        describe(replace(SHAPES["llama"], family="gpt"))


def test_a_name_that_is_taken_is_refused():
    with pytest.raises(InvalidConfig, match="family 'llama': llama, debug is there already"):
        register_family(Family(name="llama"), [find_preset("debug")])
    planned, register = Family(name="olmo", untrained="its norms have no weights"), partial(mock.patch.dict, FAMILIES)
    with register(), pytest.raises(InvalidConfig, match="family 'olmo': olmo is there already"):
        register_family(planned)
    with register():  # it trains what is only planned
        register_family(mine := Family(name="olmo", module="my_olmo:Olmo"))
        assert find_family("olmo") is mine
        with pytest.raises(InvalidConfig, match="family 'olmo': olmo is there already"):
            register_family(mine)
    trained = {name for name, family in FAMILIES.items() if not family.untrained}
    assert trained == {"llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "dots1", "mistral"}
