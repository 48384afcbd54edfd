"""Families that are planned alone: parameters, matmuls and windows are those of the model that `transformers` builds.

A model is built on the meta device, from the defaults of its config class and from small sizes with other switches.
"""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from tiny import ROOT
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.toml import parse
from dtlayout.cli import main
from dtlayout.costmodel.engine import OWN_ENGINE, find_engine
from dtlayout.costmodel.engine_rules import find_training_lacks
from dtlayout.models.coded_families import CODED
from dtlayout.models.counting import count_attention_flops_per_token, count_parameters
from dtlayout.models.families import FAMILIES, block_tape, describe
from dtlayout.models.files import to_hf
from dtlayout.models.hf_config import parse_hf
from dtlayout.models.hf_text_part import TEXT_PARTS
from dtlayout.models.planned_families import PLANNED, REFUSED
from dtlayout.models.presets import find_preset
from dtlayout.models.tape import TapeOptions
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import BlockVariant, ModelShape
from dtlayout.spec.precision import Precision

NAMES = [family.name for family in PLANNED]
ELSEWHERE = {"kimi_k2": "deepseek_v3"}
"""Family that `transformers` has under another name → a family there with the same blocks."""
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6}, "ministral": {"head_dim": 128}, "nemotron": {"num_key_value_heads": 8},
    "hunyuan_v1_dense": {"head_dim": 128}, "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4, "moe_topk": 2},
}  # fmt: skip
"""Family → keys without which `transformers` builds no model by default."""
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 120,
    "intermediate_size": 48, "pad_token_id": None,
}  # fmt: skip
OF_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 3}
LATENT = {
    "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": 8,
}  # fmt: skip
ROUTED = OF_EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 3, "first_k_dense_replace": 2}
DEEPSEEK = LATENT | ROUTED
MIXED = {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
KINDS = ["full_attention", "sliding_attention", *["full_attention"] * 4]
BIASED = {"attention_bias": True}
ALL_BIASED = {"attention_bias": True, "mlp_bias": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("ministral", {"head_dim": 12}), ("ministral", {"head_dim": 12, "layer_types": KINDS}),
    ("ministral3", {"head_dim": 12, "sliding_window": 9}), ("phi3", {"sliding_window": 7}), ("phi3", {}),
    ("olmo", BIASED), ("olmo2", {}), ("olmo2", BIASED), ("olmo3", {}), ("olmo3", {"layer_types": KINDS}),
    ("olmoe", {"num_experts": 5, "num_experts_per_tok": 2, **BIASED}),
    ("flex_olmo", {"num_experts": 5, "num_experts_per_tok": 2}), ("internlm3", {"head_dim": 12}),
    ("internlm3", ALL_BIASED), ("iquestcoder", {"head_dim": 12, **ALL_BIASED}),
    ("deepseek_v2", {**DEEPSEEK, "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"}),
    ("deepseek_v2", {**DEEPSEEK, "q_lora_rank": None}), ("deepseek_v3", {**DEEPSEEK, "n_group": 2, "topk_group": 2}),
    ("deepseek_v3", {**DEEPSEEK, **ONE_GROUP, "q_lora_rank": None}), ("kimi_k2", {**DEEPSEEK, **ONE_GROUP}),
    ("glm4_moe_lite", {**DEEPSEEK, **MIXED}), ("minicpm3", LATENT), ("youtu", LATENT),
    ("gpt_oss", {"num_local_experts": 5, "num_experts_per_tok": 2}), ("gpt_oss", {"attention_bias": False}),
    ("gemma", {"head_dim": 12}), ("gemma", BIASED), ("gemma2", {"head_dim": 12}), ("gemma2", {"layer_types": KINDS}),
    ("gemma3_text", {"head_dim": 12}), ("gemma3_text", {"sliding_window_pattern": 2}), ("vaultgemma", BIASED),
    ("granite", ALL_BIASED), ("granite_swa", ALL_BIASED), ("granitemoe", {"num_local_experts": 5, **BIASED}),
    ("granitemoeshared", {"shared_intermediate_size": 20}), ("hyperclovax", {"use_post_norm": False, "head_dim": 12}),
    ("hyperclovax", {**ALL_BIASED, "head_dim": 12}), ("smollm3", ALL_BIASED),
    ("smollm3", {"tie_word_embeddings": False}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": KINDS}),
    ("seed_oss", {"head_dim": 12, "attention_out_bias": True, "mlp_bias": True}),
    ("seed_oss", {"attention_bias": False}),
    ("glm", {"head_dim": 12}), ("glm", {"attention_bias": False}), ("glm4", {"head_dim": 12}),
    ("glm4_moe", {**ROUTED, "head_dim": 12, "use_qk_norm": True, **BIASED}), ("glm4_moe", {"num_attention_heads": 4}),
    ("solar_open", {**OF_EXPERTS, "n_routed_experts": 8, "head_dim": 12, **BIASED}),
    ("qwen2_moe", {**OF_EXPERTS, "num_experts": 5, "shared_expert_intermediate_size": 36, "qkv_bias": False}),
    ("ernie4_5", {"use_bias": True, "head_dim": 12}), ("ernie4_5", {}),
    ("ernie4_5_moe", {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 12, "moe_layer_start_index": 2}),
    ("hunyuan_v1_dense", {"head_dim": 12, **BIASED}),
    ("hunyuan_v1_moe", {"head_dim": 12, "num_experts": 5, "moe_topk": [2] * 6}),
    ("cohere", {"use_qk_norm": True, **BIASED}), ("cohere", {}), ("cohere2", {"head_dim": 12}), ("cohere2", BIASED),
    ("starcoder2", {"use_bias": False, "sliding_window": 5}), ("starcoder2", {}), ("nemotron", ALL_BIASED),
    ("nemotron", {"head_dim": 12}), ("stablelm", {"use_parallel_residual": True}), ("stablelm", {"use_qkv_bias": True}),
    ("arcee", {"head_dim": 12, **ALL_BIASED}), ("jais2", {"head_dim": 12}), ("jais2", {"attention_bias": False}),
    ("helium", {"head_dim": 8, **ALL_BIASED}), ("cwm", {"head_dim": 12}), ("exaone4", {}),
    ("exaone4", {"sliding_window_pattern": 3}),
    ("exaone_moe", {**OF_EXPERTS, **MIXED, "num_experts": 5, "num_shared_experts": 2}),
    ("minimax_m2", {"head_dim": 12, "num_local_experts": 5, "num_experts_per_tok": 2}),
    ("minimax_m2", {"use_qk_norm": True, "qk_norm_type": "per_layer", "rotary_dim": 4, "num_mtp_modules": 3}),
    ("mellum", {**OF_EXPERTS, "num_local_experts": 5, "head_dim": 12, "layer_types": KINDS}),
    ("phimoe", {"num_local_experts": 5, "num_experts_per_tok": 2, **BIASED}),
    ("hy_v3", {**OF_EXPERTS, **MIXED, "num_experts": 5, "num_shared_experts": 2, "head_dim": 12}),
]  # fmt: skip
"""Family, and keys beside `SMALL`."""


@pytest.fixture(autouse=True, scope="module")
def silent() -> Iterator[None]:
    """transformers warns about tokens beyond a small vocabulary."""
    before = logging.getLogger("transformers").level
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before or logging.WARNING)


def read_config(family: str, keys: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The config of transformers, and what it writes as config.json."""
    config = AutoConfig.for_model(ELSEWHERE.get(family, family), **keys)
    return config, config.to_dict() | {"model_type": family}


def build(config: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def list_sizes(model: torch.nn.Module) -> dict[str, int]:
    """Elements of each parameter, and of each bias of a router, which are buffers there."""
    counters = {name: each for name, each in model.named_buffers() if "correction_bias" in name}
    return {name: each.numel() for name, each in (*model.named_parameters(), *counters.items())}


def count_matrices(model: torch.nn.Module) -> int:
    """Elements that multiply a token in blocks, all experts counted."""
    named = ((name, each) for name, each in model.named_parameters() if ".layers." in name)
    return sum(p.numel() for name, p in named if p.dim() > 1 and "norm" not in name and not name.endswith("bias"))


def count_described_matrices(shape: ModelShape) -> int:
    kinds = shape.kinds(range(shape.num_layers))
    weights = ((weight, number) for kind, number in kinds for weight in describe(kind).block_weights)
    return sum(number * weight.numel for weight, number in weights if weight.role in ("matrix", "expert"))


def count_windows(config: Any) -> float:
    """Blocks with a window."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not window:
        return 0
    return kinds.count("sliding_attention") if kinds else config.num_hidden_layers


def check_same(family: str, keys: dict[str, Any]) -> ModelShape:
    config, file = read_config(family, keys)
    shape, model = parse_hf(file), build(config)
    assert count_parameters(shape) == sum(list_sizes(model).values())
    assert count_described_matrices(shape) == count_matrices(model)
    assert shape.windowed_share * shape.num_layers == pytest.approx(count_windows(config))
    return shape


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_default_sizes_has_the_parameters_of_transformers_and_a_silent_file_means_it(name):
    needed = NEEDED.get(name, {})
    shape = check_same(name, needed)
    assert parse_hf({"model_type": name, **needed}) == shape


@pytest.mark.parametrize(("name", "keys"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_small_model_with_other_switches_has_the_parameters_of_transformers(name, keys):
    sizes = SMALL | {"sliding_window": 4} if FAMILIES[name].window and FAMILIES[name].window.switch == "" else SMALL
    check_same(name, sizes | NEEDED.get(name, {}) | keys)


def test_every_family_has_a_small_model_too():
    assert {name for name, _ in CASES} == set(NAMES)


PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "mistral-7b-v0.1": (7_241_732_096, {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "sliding_window": 4096, "vocab_size": 32000,
    }),
    "mistral-small-24b": (23_572_403_200, {
        "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": None,
        "vocab_size": 131072,
    }),
    "phi-4": (14_659_507_200, {
        "model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920, "num_attention_heads": 40,
        "num_hidden_layers": 40, "num_key_value_heads": 10, "sliding_window": None, "vocab_size": 100352,
        "pad_token_id": 100349,
    }),
    "gemma-2-9b": (9_241_705_984, {
        "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
        "num_hidden_layers": 42, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000,
    }),
    "olmoe-1b-7b": (6_919_161_856, {
        "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16,
        "num_hidden_layers": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
        "vocab_size": 50304,
    }),
    "gpt-oss-20b": (20_914_757_184, {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128, "attention_bias": True,
        "quantization_config": {"quant_method": "mxfp4"}, "experts_per_token": 4, "swiglu_limit": 7.0,
    }),
    "deepseek-v2-lite": (15_706_484_224, {
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 27, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "vocab_size": 102400, "topk_method": "greedy", "scoring_func": "softmax", "aux_loss_alpha": 0.001,
        "seq_aux": True, "ep_size": 1, "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"},
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
    }),
    "qwen1.5-moe-a2.7b": (14_315_784_192, {
        "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_attention_heads": 16, "num_hidden_layers": 24,
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "decoder_sparse_step": 1,
        "vocab_size": 151936, "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21,
    }),
}  # fmt: skip
"""Published model → the sum of its safetensors on the hub, and sizes of its config.json."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_as_many_parameters_as_its_files(name):
    number, file = PUBLISHED[name]
    assert count_parameters(parse_hf(file)) == number
    keys = {key: value for key, value in file.items() if key not in ("model_type", "auto_map", "quantization_config")}
    assert sum(list_sizes(build(AutoConfig.for_model(file["model_type"], **keys))).values()) == number


DENSE = ["phi3", "olmo2", "gemma2", "gemma3_text", "glm4", "granite", "smollm3", "seed_oss", "cohere", "starcoder2",
         "stablelm", "arcee", "exaone4", "minicpm3", "deepseek_v3"]  # fmt: skip
SEQ_LEN = 16


@pytest.mark.parametrize("name", DENSE)
def test_flops_of_matmuls_are_those_that_torch_counts(name):
    dense = {"first_k_dense_replace": 6, **LATENT} if name == "deepseek_v3" else LATENT if name == "minicpm3" else {}
    config, file = read_config(name, SMALL | dense)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, use_cache=False)
    shape = parse_hf(file | {"first_k_dense_replace": 0} if dense else file)
    shape = replace(shape, experts=None)
    of_blocks = 2 * count_described_matrices(shape) + 6 * count_attention_flops_per_token(shape, SEQ_LEN)
    head = 2 * shape.vocab_size * shape.hidden_size
    # transformers turns the wavelengths into angles by a matmul of one column.
    assert counter.get_total_flops() == pytest.approx(SEQ_LEN * (of_blocks + head), rel=1e-3)


def test_most_decoders_of_transformers_are_planned_and_no_other_is_taken_for_one():
    planned, refused = set[str](), dict[str, str]()
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            file = AutoConfig.for_model(name, **NEEDED.get(name, {})).to_dict()
        except Exception:  # a config class whose own defaults it refuses
            continue
        try:
            parse_hf(file)
            planned.add(name)
        except InvalidConfig as error:
            refused[name] = error.problems[0]
    assert planned - {"gemma3"} == set(FAMILIES) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert len(planned) >= 55 and len(refused) > 60
    assert all(
        "is not known" in line or "wraps a text model" in line or "is missing" in line for line in refused.values()
    )


def test_a_refused_decoder_says_why():
    assert not set(REFUSED) & set(FAMILIES)
    for name, reason in REFUSED.items():
        with pytest.raises(InvalidConfig, match=f"model_type='{name}' is not known: {reason}; use one of llama, "):
            parse_hf({"model_type": name})


@pytest.mark.parametrize("name", TEXT_PARTS)
def test_of_a_model_that_sees_images_the_text_part_is_counted(name):
    config = AutoConfig.for_model(name)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    theirs = {
        id(each): each.numel() for part in (model.model.language_model, model.lm_head) for each in part.parameters()
    }
    assert count_parameters(parse_hf(config.to_dict())) == sum(theirs.values())


def test_text_beside_a_vision_config_is_read_as_older_files_have_it():
    file = {
        "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "hidden_size": 2048,
        "intermediate_size": 11008, "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2,
        "vocab_size": 151936, "tie_word_embeddings": True, "vision_config": {"depth": 32}, "image_token_id": 151655,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "use_sliding_window": False,
    }  # fmt: skip
    assert count_parameters(parse_hf(file)) == count_parameters(find_preset("qwen2.5-3b"))


def test_a_text_part_of_an_unknown_family_is_refused():
    with pytest.raises(InvalidConfig, match="model_type='mamba' is not known: it has state-space blocks"):
        parse_hf({"model_type": "llava", "text_config": {"model_type": "mamba"}})


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("phi3", {"hidden_act": "xielu"}, "hidden_act='xielu' is not known; use one of silu, swish, gelu"),
    ("gemma2", {"hidden_activation": "polynorm"}, "hidden_activation='polynorm' is not known"),
    ("phi3", {"num_experts": 8}, "num_experts=8 is not known, and may change sizes"),
    ("phi3", {"attention_bias": True}, "attention_bias=true is not known"),
    ("phi3", {"hidden_size": None}, "hidden_size is missing: it is null"),
    ("phi3", {"architectures": ["Phi4FlashForCausalLM"]}, "architectures names Phi4FlashForCausalLM"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true is not known"),
    ("olmo3", {"layer_types": ["full_attention"] * 31 + ["linear_attention"]}, "names 'linear_attention'; full_attent"),
    ("olmo3", {"layer_types": ["full_attention"]}, "must name each of num_hidden_layers=32 blocks"),
    ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern='LLLG' is not known without layer_types"),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 9}, "use_sliding_window=true is not known without lay"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias=True is not known; False is"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not known; 1 is"),
    ("deepseek_v3", {"qk_nope_head_dim": None}, "qk_nope_head_dim=None, qk_rope_head_dim=64: no size follows"),
    ("deepseek_v3", {"num_local_experts": 8, "n_routed_experts": 9}, "n_routed_experts=9 and num_local_experts=8 mean"),
    ("deepseek_v2", {}, "num_experts_per_tok is missing"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse"] * 46 + ["dense"]}, "mlp_layer_types=.* dense blocks must come"),
    ("qwen2_moe", {"mlp_only_layers": [3]}, r"mlp_only_layers=\[3\] is not known"),
    ("ernie4_5_moe", {"moe_layer_end_index": 3}, "moe_layer_end_index=3 is not known; the last block must have expert"),
    ("hunyuan_v1_moe", {"moe_topk": [1, 2], "num_experts": 4}, r"moe_topk=\[1, 2\] is not known; it must be the same"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm=True is not known; False is"),
    ("phimoe", {"lm_head_bias": True}, "lm_head_bias=True is not known; False is"),
    ("cohere", {"num_attention_heads": 7}, "num_kv_heads=64 does not divide num_heads=7"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keys", "problem"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_what_would_change_sizes_is_refused(name, keys, problem):
    with pytest.raises(InvalidConfig, match=problem):
        parse_hf({"model_type": name, **keys})


@pytest.mark.parametrize("name", NAMES)
def test_a_planned_family_is_not_trained_and_says_so_in_one_line(name):
    shape = parse_hf({"model_type": name, **NEEDED.get(name, {})})
    own, precision = find_engine(OWN_ENGINE, "cpu"), Precision()
    (line,) = find_training_lacks(own, Layout(), shape, precision)
    reason = FAMILIES[name].untrained
    advice = "use a model of another family" if shape.experts else "trace it: dtlayout trace FOLDER"
    assert line.startswith(f"model.family={name} is planned, not trained: {reason}; {advice}")
    assert "\n" not in line and reason.endswith(tuple("abcdefghijklmnopqrstuvwxyz1"))
    with pytest.raises(InvalidConfig, match=f"model.family={name} is planned, not trained"):
        to_hf(shape, "float32")


def test_a_window_keeps_a_mistral_from_training_and_no_window_does_not():
    own, precision = find_engine(OWN_ENGINE, "cpu"), Precision()
    (line,) = find_training_lacks(own, Layout(), parse_hf({"model_type": "mistral"}), precision)
    assert line == "model.window=4096 can be predicted, not trained; use window=0"
    free = parse_hf({"model_type": "mistral", "sliding_window": None})
    assert find_training_lacks(own, Layout(), free, precision) == []


DEBUG = find_preset("debug")
SPLIT = TapeOptions(is_split=True)


def tape_of(norms: str, options: TapeOptions = SPLIT, **fields: Any) -> Any:
    return block_tape(replace(DEBUG, block=parse({"norms": norms, **fields}, BlockVariant, "model.block")), options)


@pytest.mark.parametrize(("norms", "gathers", "sums", "count"), [
    ("before", 2, 2, 2), ("after", 2, 2, 2), ("both", 2, 2, 4), ("shared", 1, 2, 1),
])  # fmt: skip
def test_norms_stand_where_they_are_said_to(norms, gathers, sums, count):
    kinds = [entry.kind for entry in tape_of(norms)]
    assert [kinds.count(each) for each in ("gather", "sum", "norm")] == [gathers, sums, count]
    assert kinds.count("residual") == (1 if norms == "shared" else 2)
    assert kinds.count("alias") == (2 if norms == "after" else 0)


def test_a_branch_without_a_norm_before_it_saves_the_stream_once_for_each_branch():
    saved = [tensor.name for entry in tape_of("after", TapeOptions()) for tensor in entry.saves]
    assert [name for name in saved if name.endswith(".stream")] == ["self_attn.stream", "mlp.stream"]
    assert "self_attn.o_proj" in saved and "mlp.down_proj" in saved  # what the norms behind them read


def test_a_block_variant_that_changes_nothing_is_no_variant():
    assert replace(DEBUG, block=BlockVariant()) == DEBUG
    assert replace(DEBUG, window_share=0.25) == DEBUG
    assert replace(DEBUG, window=8, window_share=0.5) == replace(DEBUG, window=8)


@pytest.mark.parametrize(("fields", "problem"), [
    ({"window": 8, "window_share": 0.0}, "window_share=0.0 must be above 0 and at most 1; use window=0"),
    ({"window": 8, "window_share": 1.5}, "window_share=1.5 must be above 0 and at most 1"),
])  # fmt: skip
def test_a_share_of_blocks_lies_between_none_and_all(fields, problem):
    with pytest.raises(InvalidConfig, match=problem):
        replace(DEBUG, **fields)


def test_a_norm_behind_experts_and_a_shared_expert_is_not_known():
    shape = find_preset("dots.llm1")
    with pytest.raises(InvalidConfig, match="norms='both' is not known beside model"):
        replace(shape, block=BlockVariant(norms="both"))
    with pytest.raises(InvalidConfig, match="shared_gate=true gates nothing where shared_ffn_size=0"):
        replace(shape.experts, shared_ffn_size=0, shared_gate=True)


def read_table(page: str, heading: str) -> dict[str, str]:
    """First column → last column of the table below a heading, a row for each name in it."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)
    return {name: text for names, text in rows for name in re.findall(r"`(\w+)`", names)}


def test_the_page_of_models_has_every_family_with_its_reason():
    page = (ROOT / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    assert list(read_table(page, "Trained")) == [name for name, family in FAMILIES.items() if not family.untrained]
    assert read_table(page, "Planned") == {family.name: family.untrained for family in (*PLANNED, *CODED)}
    assert read_table(page, "Refused") == REFUSED
    assert read_table(page, "Text parts") == {name: f"`{part.family}`" for name, part in TEXT_PARTS.items()}


MEDIUM = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8,
    "intermediate_size": 6144, "vocab_size": 64_000, "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip
CLUSTER = ("--gpu", "h100-80g-sxm", "--gpus", "8", "--seq-len", "2048", "--global-batch", "32", "--top", "1")
ASKED = (*CLUSTER, "--fix", "tp=2,pp=1,cp=1,recompute=none,micro_batch=1")


@pytest.mark.parametrize("engine", ["dtlayout", "megatron"])
@pytest.mark.parametrize("name", ["phi3", "olmo2", "gpt_oss", "cohere2", "llava"])
def test_recommend_plans_it_for_every_engine(name, engine, tmp_path, capsys):
    folder = tmp_path / f"my-{name}"
    folder.mkdir()
    file = {"model_type": name, **MEDIUM}
    if name == "llava":
        file = {"model_type": name, "text_config": {"model_type": "llama", **MEDIUM}, "vision_config": {}}
    if name == "gpt_oss":
        file |= {"num_local_experts": 8, "intermediate_size": 480}
    (folder / "config.json").write_text(json.dumps(file))
    assert main(["recommend", "--model", str(folder), "--engine", engine, *ASKED]) == 0
    named = f"my-{name}" + "-text-part" * (name == "llava")
    billions = count_parameters(parse_hf(file)) / 1e9
    assert capsys.readouterr().out.startswith(f"{named}, {billions:.2f} billion parameters, on 8 x h100-80g-sxm")


def test_megatron_gets_no_arguments_for_blocks_that_they_cannot_say(tmp_path, capsys):
    file = tmp_path / "config.json"
    asked = ("recommend", "--model", str(file), *ASKED, "--engine", "megatron", "--emit", str(tmp_path / "out.sh"))
    file.write_text(json.dumps({"model_type": "olmo2", **MEDIUM}))
    assert main(asked) == 2
    assert "arguments for blocks of family olmo2 are not written; leave out --emit" in capsys.readouterr().err
    file.write_text(json.dumps({"model_type": "glm", **MEDIUM}))
    assert main(asked) == 0
    assert "model.family=glm: its weights of gate and up are one matrix, and no argument" in capsys.readouterr().out
