"""A config.json is read as `transformers` reads it: every number, with keys left out; and what is not known is named.

Defaults are those of `transformers` 5, which has them from 4, in the config class of each family. What
changed in 5 is where the rotary embedding's numbers stand, and both spellings are drawn here.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.counting import count_parameters
from dtlayout.models.families import FAMILIES
from dtlayout.models.family import COMMON_DEFAULTS
from dtlayout.models.files import to_hf
from dtlayout.models.hf_config import parse_hf
from dtlayout.models.presets import PRESETS
from dtlayout.models.weights import list_weights
from dtlayout.ops.rope import rotary_frequencies
from dtlayout.spec.model_shape import ModelShape

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILY_NAMES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "dots1", "mistral")
"""Families that train, and are here without a plugin."""


NEEDED: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
}
"""Family → keys of a config.json without which `transformers` builds no model."""


def build(config: dict[str, Any]) -> torch.nn.Module:
    """The model that transformers makes of a config.json, without memory."""
    read = AutoConfig.for_model(**config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(read)


def find_numbers(model: Any) -> dict[str, Any]:
    """What a model of transformers computes with, beside the shapes of its weights."""
    attention = model.model.layers[0].self_attn
    rotary = type(model.model.rotary_emb)(model.config)  # not on the meta device
    return {
        "head_width": attention.head_dim, "num_kv_heads": attention.k_proj.out_features // attention.head_dim,
        "num_heads": attention.q_proj.out_features // attention.head_dim,
        "norm_eps": {m.variance_epsilon for m in model.modules() if hasattr(m, "variance_epsilon")},
        "rope_theta": model.config.rope_parameters["rope_theta"], "attention_scaling": rotary.attention_scaling,
        "frequencies": rotary.inv_freq.tolist(), "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "windows": {find_window(model, layer.self_attn) for layer in model.model.layers},
        "routing": {
            (gate.num_experts, gate.top_k, getattr(gate, "norm_topk_prob", True), getattr(gate, "num_group", 1),
             getattr(gate, "topk_group", 1), getattr(gate, "routed_scaling_factor", 1.0),
             hasattr(gate, "e_score_correction_bias"))
            for gate in (layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate"))
        },
        "balance_loss": getattr(model.config, "output_router_logits", False)
        and getattr(model, "router_aux_loss_coef", 0.0),
    }  # fmt: skip


def find_window(model: Any, attention: Any) -> int | None:
    """The window of a block's attention, which Mixtral and Mistral take from their config alone."""
    return model.config.sliding_window if model.config.model_type in ("mixtral", "mistral") else \
        getattr(attention, "sliding_window", None)  # fmt: skip


def list_numbers(shape: ModelShape) -> dict[str, Any]:
    """What a model here computes with."""
    frequencies = pytest.approx(rotary_frequencies(shape).tolist(), rel=1e-5)  # transformers has them in float32
    return {
        "head_width": shape.head_width, "num_kv_heads": shape.num_kv_heads, "num_heads": shape.num_heads,
        "norm_eps": {shape.norm_eps}, "rope_theta": shape.rope_theta, "attention_scaling": 1.0,
        "frequencies": frequencies, "tied": shape.tied_embeddings, "windows": {shape.window or None},
        "routing": {
            (e.number, e.per_token, e.normalized, e.groups, e.groups_per_token, e.scale, e.correction_bias)
        } if (e := shape.experts) else set(),
        "balance_loss": e.balance_loss if e else False,
    }  # fmt: skip


def list_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    return dict(list_weights(replace(shape, tied_embeddings=False)))


def list_values(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters of a model of transformers, and the biases of its routers, which are buffers there."""
    biases = [(name, buffer) for name, buffer in model.named_buffers() if "correction_bias" in name]
    return [*model.named_parameters(remove_duplicate=False), *biases]


def find_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of a model of transformers, where gate and up of all experts are one."""
    found = {}
    for name, parameter in list_values(model):
        name = name.replace("gate.e_score_correction", "correction").replace("shared_experts", "shared_expert")
        number, *rest = parameter.shape
        if name.endswith("gate_up_proj"):
            opening = (number, rest[0] // 2, rest[1])
            found |= {name.replace("gate_up_proj", f"{each}.weight"): opening for each in ("gate_proj", "up_proj")}
        else:
            found[name + ".weight" * name.endswith("experts.down_proj")] = (number, *rest)
    return found


def check_same(config: dict[str, Any], shape: ModelShape) -> None:
    model = build(config)
    assert list_shapes(shape) == find_shapes(model)
    assert count_parameters(shape) == sum({id(value): value.numel() for _, value in list_values(model)}.values())
    assert find_numbers(model) == list_numbers(shape)


@st.composite
def configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """A config.json of few blocks that opens, with any of its other keys left out, or null where that may be."""
    heads = draw(st.sampled_from([4, 8, 32, 64]))
    sizes: dict[str, Any] = {
        "hidden_size": heads * 2 * draw(st.integers(1, 4)), "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads, "vocab_size": draw(st.integers(8, 300)),
        "intermediate_size": draw(st.integers(1, 99)), "rms_norm_eps": draw(st.sampled_from([1e-5, 1e-6, 3e-4])),
        "num_key_value_heads": draw(st.sampled_from([2, 4, None])),
        "head_dim": 2 * draw(st.integers(1, 40)), "tie_word_embeddings": draw(st.booleans()),
        "rope_theta": draw(st.sampled_from([1e4, 1_000_000])), "hidden_act": draw(st.sampled_from(["silu", "swish"])),
        "max_position_embeddings": draw(st.integers(16, 4096)), "architectures": [FAMILIES[family].architecture],
        "attention_bias": False, "torch_dtype": "bfloat16", "use_cache": draw(st.booleans()), "mlp_bias": False,
        "use_sliding_window": False, "sliding_window": draw(st.sampled_from([None, 128])), "pad_token_id": 1,
        "max_window_layers": draw(st.integers(0, 5)), "attention_dropout": 0.0, "partial_rotary_factor": 1.0,
    }  # fmt: skip
    sizes |= draw(experts(family, sizes["num_hidden_layers"]))
    if family in ("qwen2", "qwen3") and draw(st.booleans()):  # on, but in no block
        sizes |= {"use_sliding_window": True, "max_window_layers": draw(st.integers(3, 9))}
    needed = {*NEEDED[family], "num_local_experts"} if family in NEEDED else set()
    kept = {name: value for name, value in sizes.items() if name in needed or draw(st.integers(0, 3))}
    kept["num_hidden_layers"] = sizes["num_hidden_layers"]  # many blocks take long, and their default is tested below
    kept["num_attention_heads"] = heads if heads < 32 else kept.get("num_attention_heads", 32)
    if "num_key_value_heads" not in kept and family != "llama" and kept["num_attention_heads"] % 32:
        kept["num_key_value_heads"] = 2  # without it these have 32
    if "hidden_size" not in kept:
        kept["num_attention_heads"] = draw(st.sampled_from([32, 64]))  # of 4096
    if kept.get("num_key_value_heads") == 4 and draw(st.booleans()):
        kept["num_key_value_heads"] = kept["num_attention_heads"]
    if kept.get("use_sliding_window") is None or family == "mixtral":
        kept.pop("sliding_window", None)  # a Llama that has a window is refused
    elif kept["use_sliding_window"] and kept.get("max_window_layers") is None:
        kept["max_window_layers"] = 40
    if family == "mistral" and kept.get("num_key_value_heads", 2) is None:
        kept["num_key_value_heads"] = 2  # null is refused by transformers
    if family == "dots1":
        if kept.get("max_window_layers", 62) < kept["num_hidden_layers"]:
            kept["sliding_window"] = None  # no other key turns windows off
        if "n_group" not in kept:
            kept.pop("topk_group", None)  # of one group
    for key in draw(
        st.sampled_from([(), ("rope_parameters",), ("rope_scaling",), ("rope_scaling", "rope_parameters")])
    ):
        kept[key] = draw(ropes())
    return {"model_type": family, **kept}


@st.composite
def experts(draw: st.DrawFn, family: str, num_layers: int) -> dict[str, Any]:
    """Keys of a config.json about experts; no keys for families that have none."""
    routing = {
        "num_experts_per_tok": draw(st.sampled_from([1, 2, 8])), "output_router_logits": draw(st.booleans()),
        "router_aux_loss_coef": draw(st.sampled_from([0.0, 0.001, 0.02])),
        draw(st.sampled_from(["num_experts", "num_local_experts"])): draw(st.integers(8, 20)),
        "num_key_value_heads": draw(st.sampled_from([2, 4])),  # null is refused by transformers
    }  # fmt: skip
    if family == "mixtral":
        return {**routing, "router_jitter_noise": 0.0}
    if family == "dots1":
        return draw(experts_of_dots1(num_layers))
    of_qwen = {
        "moe_intermediate_size": draw(st.integers(1, 40)), "norm_topk_prob": draw(st.booleans()),
        "mlp_only_layers": [*range(draw(st.integers(0, num_layers - 1)))], "decoder_sparse_step": 1,
    }  # fmt: skip
    return {**routing, **of_qwen} if family == "qwen3_moe" else {}


@st.composite
def experts_of_dots1(draw: st.DrawFn, num_layers: int) -> dict[str, Any]:
    """Keys about experts that DeepSeek-V3 has, too."""
    groups = draw(st.sampled_from([1, 2, 4]))
    return {
        draw(st.sampled_from(["n_routed_experts", "num_local_experts"])): draw(st.sampled_from([8, 16])),
        "n_shared_experts": draw(st.integers(1, 3)), "num_experts_per_tok": draw(st.sampled_from([1, 2])),
        "moe_intermediate_size": draw(st.integers(1, 40)), "norm_topk_prob": draw(st.booleans()),
        "first_k_dense_replace": draw(st.integers(0, num_layers - 1)), "n_group": groups,
        "topk_group": draw(st.integers(1, groups)), "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "scoring_func": draw(st.sampled_from(["sigmoid", "noaux_tc"])), "topk_method": "noaux_tc", "moe_layer_freq": 1,
        "output_router_logits": draw(st.booleans()),
    }  # fmt: skip


@st.composite
def ropes(draw: st.DrawFn) -> dict[str, Any] | None:
    name = draw(st.sampled_from(["rope_type", "type"]))
    theta = draw(st.sampled_from([{}, {"rope_theta": 7e4}]))
    original = draw(st.sampled_from([{}, {"original_max_position_embeddings": 12}]))
    llama3 = {**LLAMA3, "factor": draw(st.sampled_from([2.0, 32])), **original}
    del llama3["rope_type"]
    return draw(st.sampled_from([None, {}, theta, {name: "default", **theta}, {name: "llama3", **llama3, **theta}]))


@pytest.mark.parametrize("family", FAMILY_NAMES)
@settings(max_examples=25)
@given(data=st.data())
def test_every_number_is_that_of_transformers_whatever_a_file_leaves_out(family, data):
    config = data.draw(configs(family))
    check_same(config, parse_hf(config))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_defaults_are_those_of_the_familys_config_class(family):
    assert int(transformers.__version__.partition(".")[0]) >= 4
    read = AutoConfig.for_model(family)
    defaults = {**COMMON_DEFAULTS, **FAMILIES[family].defaults}
    theirs = {key: getattr(read, key, None) for key in defaults}
    theirs["rope_theta"] = read.rope_parameters["rope_theta"]
    follow = {"num_key_value_heads": "num_attention_heads", "head_dim": None}
    for key, other in follow.items():
        if defaults[key] is None:
            assert theirs[key] in (
                None,
                getattr(read, other) if other else read.hidden_size // read.num_attention_heads,
            )
            theirs[key] = None
    if "use_sliding_window" in defaults:
        assert read.sliding_window is None  # what is left of it where it is not used
        theirs["sliding_window"] = type(read)(use_sliding_window=True).sliding_window
    assert theirs == defaults


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_out_is_read_by_transformers_as_the_model_that_it_was(name):
    shape = replace(PRESETS[name], num_layers=2)
    for max_seq_len in (None, 64):
        config = to_hf(shape, "bfloat16", max_seq_len)
        check_same(config, shape)
        assert parse_hf(build(config).config.to_dict(), name) == shape  # as transformers writes it again


def test_no_block_of_a_deeper_model_gets_a_window_by_default():
    deeper = replace(PRESETS["dots.llm1"], num_layers=64)
    config = to_hf(deeper, "bfloat16")
    assert {*AutoConfig.for_model(**config).layer_types} == {"full_attention"}
    del config["sliding_window"]
    assert AutoConfig.for_model(**config).layer_types[61:] == ["full_attention", *["sliding_attention"] * 2]


@pytest.mark.parametrize("family", FAMILY_NAMES)
@settings(max_examples=25)
@given(data=st.data())
def test_a_file_goes_through_both_and_stays_the_same(family, data):
    shape = parse_hf(data.draw(configs(family)), "own")
    assert parse_hf(AutoConfig.for_model(**to_hf(shape, "float32")).to_dict(), "own") == shape


OFF = {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        (family, {"architectures": [name]}, f"architectures names {name}")
        for family in FAMILY_NAMES
        for name in (
            "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "MedusaModel", "LlamaModel",
            f"{family.capitalize()}ForSequenceClassification", f"{family.capitalize()}ForTokenClassification",
            f"{family.capitalize()}Model", f"{family.capitalize()}ForRewardModel", "FalconForCausalLM",
        )
    ),
    ("llama", {"architectures": ["LlamaForCausalLM", "LlamaModel"]}, "architectures names LlamaModel"),
    ("llama", {"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM' must be a list of names"),
    ("llama", {"architectures": [1]}, r"architectures=\[1\] must be a list of names"),
    ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}}, "auto_map names modeling_mine"),
    ("llama", {"model_type": None}, "model_type is missing; use one of llama, qwen2, qwen3"),
    ("llama", {"model_type": ["llama"]}, r"model_type=\['llama'\] is not known"),
    ("llama", {"model_type": "kosmos-2"}, "model_type='kosmos-2' is not known; use one of llama, qwen2"),
    ("llama", {"model_type": "phi"}, "model_type='phi' is not known: its head adds a bias; use one of llama, qwen2"),
    ("llama", {"model_type": "mllama", "text_config": {"hidden_size": 8}, "vision_config": {}},
     "model_type='mllama' wraps a text model in text_config beside vision_config"),
    ("mistral", {"layer_types": ["sliding_attention"] * 2}, "layer_types names 'sliding_attention'; full_attention al"),
    ("ministral", {"layer_types": ["full_attention"]}, "must name each of num_hidden_layers=2 blocks"),
    ("ministral", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types names 'linear_attention'"),
    ("mistral", {"sliding_window": 0.5}, "window=0.5 must be a whole number"),
    ("mistral", {"hidden_act": "gelu"}, "hidden_act='gelu' is not known; 'silu' is"),
    ("llama", {"attention_bias": True}, "attention_bias=true is not known"),
    ("qwen3", {"attention_bias": True}, "attention_bias=true is not known"),
    ("llama", {"mlp_bias": True}, "mlp_bias=true is not known"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1 is not known"),
    ("llama", {"sliding_window": 128}, "sliding_window=128 is on"),
    ("qwen2", OFF, "sliding_window=128 is on in blocks from 1 on"),
    ("qwen3", {**OFF, "sliding_window": 0}, "sliding_window=0 is on in blocks from 1 on"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, "sliding_window=4096 is on"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"], **OFF}, "layer_types names 'sliding_attention'"),
    ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types names 'linear_attention'"),
    ("qwen3", {"layer_types": ["full_attention"]}, "must name each of num_hidden_layers=2 blocks"),
    ("qwen3", {"layer_types": "full_attention"}, "must name each of num_hidden_layers=2 blocks"),
    ("qwen3", {"head_dim": None}, "head_dim=null is not known; qwen3 takes 128 without the key"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not known"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor=0.5"),
    ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config=.*gptq"),
    ("llama", {"quantization": {"group_size": 64, "bits": 4}}, "quantization="),
    ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not known"),
    ("llama", {"draft_vocab_size": 32}, "draft_vocab_size=32 is not known"),
    ("llama", {"medusa_num_heads": 5}, "medusa_num_heads=5 is not known"),
    ("llama", {"num_experts": 8, "num_experts_per_tok": 2}, "num_experts=8 is not known"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not known; 'silu' is"),
    ("llama", {"hidden_act": None}, "hidden_act=None is not known"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling='linear' must be a table"),
    ("llama", {"rope_scaling": ["linear", 2]}, r"rope_scaling=\['linear', 2\] must be a table"),
    ("llama", {"rope_parameters": 4.0}, "rope_parameters=4.0 must be a table"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of type 'linear' is not known"),
    ("llama", {"rope_scaling": {"rope_type": ["yarn"]}}, r"rope_scaling of type \['yarn'\] is not known"),
    ("llama", {"rope_scaling": {"type": None}}, "rope_scaling of type None is not known"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor is missing"),
    ("llama", {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "rope_scaling.mrope_section is not"),
    ("qwen2", {"rope_parameters": {"full_attention": {"factor": 2}}}, "rope_parameters.full_attention is not known"),
    ("llama", {"rope_theta": None}, "rope_theta=None must be a number"),
    ("llama", {"rope_theta": float("nan")}, "rope_theta=nan must be"),
    ("llama", {"hidden_size": None}, "hidden_size is missing: it is null"),
    ("llama", {"vocab_size": 8.5}, "vocab_size=8.5 must be a whole number"),
    ("llama", {"tie_word_embeddings": "yes"}, "tied_embeddings='yes' must be true or false"),
    ("mixtral", {"num_local_experts": 8, "num_experts": 16}, "num_local_experts=8 and num_experts=16 mean the same"),
    ("mixtral", {"num_local_experts": None}, "num_local_experts is missing: it is null"),
    ("mixtral", {"num_local_experts": 1}, "per_token=2 is more than number=1"),
    ("mixtral", {"num_local_experts": 8.5}, "experts.number=8.5 must be a whole number"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not known; 0.0 is"),
    ("mixtral", {"output_router_logits": "yes"}, "output_router_logits='yes' must be true or false"),
    ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": -1.0}, "balance_loss=-1.0 must be at least 0"),
    ("mixtral", {"n_shared_experts": 1}, "n_shared_experts=1 is not known"),
    ("mixtral", {"norm_topk_prob": True}, "norm_topk_prob=true is not known"),
    ("mixtral", {"sliding_window": 128}, "sliding_window=128 is on in blocks from 0 on; use sliding_window=null"),
    ("mixtral", {**OFF, "use_sliding_window": False, "max_window_layers": 2, "layer_types": ["full_attention"] * 2},
     "sliding_window=128 is on in blocks from 0 on; use sliding_window=null"),
    ("qwen3_moe", {"num_experts": 8, "num_local_experts": 16}, "num_experts=8 and num_local_experts=16 mean the same"),
    ("qwen3_moe", {"num_local_experts": None}, "num_experts is missing: it is null"),
    ("qwen3_moe", {"num_experts": 0}, "experts.number=0 must be from 1"),
    ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size is missing: it is null"),
    ("qwen3_moe", {"norm_topk_prob": "yes"}, "experts.normalized='yes' must be true or false"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not known; 1 is"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0 is not known; 1 is"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] is not known; it must have the first blocks"),
    ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers=1 is not known; it must have the first blocks"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "dense_layers=2 leaves none of num_layers=2 blocks with experts"),
    ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64 is not known"),
    ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm=False is not known; True is"),
    ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not known"),
    ("qwen3_moe", {**OFF, "max_window_layers": 2}, "sliding_window=128 is on in blocks from 0 on; use use_slid"),
    ("dots1", {}, "n_routed_experts is missing"),
    ("dots1", {"n_routed_experts": None}, "n_routed_experts is missing: it is null"),
    ("dots1", {"n_group": None}, "n_group is missing: it is null"),
    ("dots1", {"n_routed_experts": 8, "num_local_experts": 16}, "n_routed_experts=8 and num_local_experts=16 mean the"),
    ("dots1", {**NEEDED["dots1"], "n_shared_experts": 1.5}, "n_shared_experts=1.5 of moe_intermediate_size=1408 is no"),
    ("dots1", {**NEEDED["dots1"], "n_group": 3}, "experts.groups=3 does not divide number=8"),
    ("dots1", {**NEEDED["dots1"], "first_k_dense_replace": 2}, "dense_layers=2 leaves none of num_layers=2 blocks"),
    ("dots1", {"scoring_func": "softmax"}, "scoring_func='softmax' is not known; 'sigmoid' is"),
    ("dots1", {"topk_method": "group_limited_greedy"}, "topk_method='group_limited_greedy' is not known; 'noaux_tc' i"),
    ("dots1", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not known; 1 is"),
    ("dots1", {"attention_bias": True}, "attention_bias=true is not known"),
    ("dots1", {"q_lora_rank": 64}, "q_lora_rank=64 is not known"),
    ("dots1", {**OFF, "use_sliding_window": False}, "sliding_window=128 is on in blocks from 1 on; use slid"),
    ("dots1", {"num_hidden_layers": 63}, "sliding_window=4096 is on in blocks from 62 on; use sliding_window=null"),
    ("dots1", OFF, "use_sliding_window=true is not known of dots1"),
    ("llama", {"hidden_size": 18, "head_dim": 4}, "hidden_size=18 is no multiple of num_attention_heads=4"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "change", "why"), REFUSED)
def test_what_is_not_known_is_named(family, change, why):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    with pytest.raises(InvalidConfig, match=why) as caught:
        parse_hf({"model_type": family, **sizes, **change})
    assert all("\n" not in problem for problem in caught.value.problems)


@pytest.mark.parametrize(("family", "keys"), [("qwen3_moe", ("num_experts", "num_local_experts")),
                                                 ("mixtral", ("num_local_experts", "num_experts"))])  # fmt: skip
def test_experts_are_counted_under_either_name_or_under_both(family, keys):
    read = [parse_hf({"model_type": family, **dict.fromkeys(chosen, 16)}) for chosen in (keys, keys[:1], keys[1:])]
    assert read[0] == read[1] == read[2] and read[0].experts.number == 16
    assert [key in to_hf(read[0], "bfloat16") for key in keys] == [True, False]


def test_a_default_that_breaks_the_rest_is_named():
    with pytest.raises(InvalidConfig, match="num_kv_heads=32 does not divide num_heads=12") as caught:
        parse_hf({"model_type": "qwen2", "hidden_size": 96, "num_attention_heads": 12})
    assert "num_key_value_heads=32" in caught.value.problems[-1] and "takes for qwen2" in caught.value.problems[-1]


def test_a_draft_head_whose_file_says_no_kind_of_model_is_no_llama():
    with pytest.raises(InvalidConfig, match="model_type is missing"):
        parse_hf({"medusa_num_heads": 5, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"})


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_an_architecture_alone_says_the_family(family):
    needed, named = NEEDED.get(family, {}), {"architectures": [FAMILIES[family].architecture]}
    by_type = parse_hf({"model_type": family, **needed})
    assert parse_hf({**named, **needed}) == by_type == parse_hf({**named, "model_type": family, **needed})


HARMLESS = {
    "auto_map": {"AutoModelForCausalLM": "modeling_flash_llama.LlamaForCausalLM"}, "_name_or_path": "x/y",
    "transformers_version": "4.40.1", "pretraining_tp": 2, "unsloth_version": "2024.9", "bos_token_id": 1,
    "eos_token_id": [1, 2], "pad_token_id": -1, "initializer_range": 0.01, "rope_interleaved": False,
    "is_llama_config": True, "quantization_config": None, "residual_multiplier": 1.0, "num_experts": 0,
    "_attn_implementation": "sdpa", "tokenizer_class": "LlamaTokenizer", "use_cache": True, "layer_types": None,
    "transformers.js_config": {"dtype": "q4"}, "max_sequence_length": 2048, "dtype": "bfloat16",
    "_from_model_config": True, "context_window_size": 2048, "prefill_chunk_size": 2048,
}  # fmt: skip


def test_harmless_keys_pass():
    sizes = {"model_type": "llama", "num_hidden_layers": 2}
    assert parse_hf({**sizes, **HARMLESS}) == parse_hf(sizes)
    saved = PretrainedConfig().to_dict() | GenerationConfig._get_default_generation_params()
    del saved["is_encoder_decoder"], saved["architectures"]
    everything = {key: 3 if value is None else value for key, value in saved.items()}
    assert parse_hf({**everything, **sizes}) == parse_hf(sizes)


STRANGERS = [
    "gemma2", "gemma3_text", "granite", "granitemoe", "cohere", "cohere2", "olmo2", "olmo3", "olmoe", "phi", "phi3",
    "phimoe", "mistral", "ministral", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3",
    "glm", "glm4", "glm4_moe", "nemotron", "starcoder2", "smollm3", "minimax", "gpt_oss", "falcon_h1", "exaone4",
    "helium", "stablelm", "llama4_text", "ernie4_5", "seed_oss", "arcee", "apertus", "diffllama", "jetmoe", "bitnet",
    "lfm2", "jamba",
]  # fmt: skip
PASSING = {
    "initializer_range", "layer_norm_eps", "num_logits_to_keep", "pretraining_tp", "use_cache", "aux_loss_coef",
    "use_associative_scan", "original_max_position_embeddings",
}  # fmt: skip
"""Keys of theirs that change no logits of a Llama: how weights begin, what is kept, what an unused part does."""


def list_strange_keys() -> Iterator[tuple[str, str, Any]]:
    own = {*PretrainedConfig().to_dict(), *AutoConfig.for_model("qwen3").to_dict(), *PASSING, "rope_theta", "mlp_bias"}
    for kind in filter(CONFIG_MAPPING_NAMES.__contains__, STRANGERS):
        for key, value in getattr(transformers, CONFIG_MAPPING_NAMES[kind])().to_dict().items():
            if key not in own and not key.endswith("token_id") and value not in (None, False, "", 0, [], {}):
                yield kind, key, value


def test_what_other_families_compute_with_is_refused_in_a_llama():
    strange = list(list_strange_keys())
    assert len(strange) > 150 and len({kind for kind, _, _ in strange}) > 25
    passed = []
    for kind, key, value in strange:
        if value == 1:  # of a factor the value that changes nothing
            continue
        try:
            parse_hf({"model_type": "llama", key: value})
            passed.append((kind, key, value))
        except InvalidConfig as error:
            assert any(key in problem for problem in error.problems)
    assert passed == []
