"""The config.json of a family that is planned and not trained: its sizes, and whatever would change them. No torch.

Keys of the rotary embedding, factors and caps change no prediction and pass. A key that is not known, and whose name
sounds like a size, is refused as in `models.hf_config`.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.models.family import SIZE_KEYS, Derived, Family
from dtlayout.models.hf_windows import list_window_keys, read_windows

_ACTIVATIONS = (
    "silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2", "tanh",
)  # fmt: skip
"""Activation functions without weights."""
_WITHOUT_SIZES = {
    "activation_function", "aux_loss_alpha", "attention_multiplier", "attn_logit_softcapping", "beta_fast", "clip_qkv",
    "dim_model_base", "embd_pdrop", "embedding_dropout", "embedding_initializer_range", "embedding_multiplier",
    "enable_moe_fp32_combine", "ep_size", "final_logit_softcapping", "hidden_activation", "hidden_dropout",
    "input_jitter_noise", "layer_rope_theta", "logit_scale", "logits_scaling", "max_window_layers", "moe_norm_min",
    "n_group", "no_rope_layer_interval", "no_rope_layers", "norm_topk_prob", "num_nextn_predict_layers",
    "output_router_logits", "qk_head_dim", "quantization_config", "query_pre_attn_scalar", "resid_pdrop",
    "residual_dropout", "residual_multiplier", "rope_interleave", "router_aux_loss_coef", "router_jitter_noise",
    "router_scaling_factor", "routed_scaling_factor", "scale_depth", "scale_emb", "scoring_func", "seq_aux",
    "swiglu_alpha", "swiglu_limit", "topk_group", "topk_method", "_sliding_window_pattern", "attention_dropout",
    "initial_context_length", "experts_per_token", "original_max_position_embeddings", "partial_rotary_factor",
    "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "mtp_layer_types", "mtp_mlp_layer_types",
}  # fmt: skip
"""Keys with which these families compute, and which change no size and no matmul. Blocks that predict later tokens
(num_nextn_predict_layers) are no part of the model that `transformers` builds."""


def list_planned_keys(family: Family) -> set[str]:
    """Keys of config.json that are read for a family that is planned, or that change nothing for it."""
    read = {*SIZE_KEYS.values(), *list_window_keys(family.window), "layer_types", *_WITHOUT_SIZES}
    for key in family.keys.values():
        read.update(key.keys if isinstance(key, Derived) else (key,))
    return read


def read_planned(config: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    """Fields of `ModelShape`, with tables in it as tables, and problems with the keys of a config.json.

    `config` has no two keys that mean the same; keys that it lacks have the family's defaults.
    """
    given = {"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
             **family.defaults, **_find_theta(config), **config}  # fmt: skip
    table: dict[str, Any] = deepcopy(dict(family.traits))
    problems = []
    for act in ("hidden_act", "hidden_activation"):
        if given.get(act) is not None and given[act] not in _ACTIVATIONS:
            problems.append(f"{act}={given[act]!r} is not known; use one of {', '.join(_ACTIVATIONS)}")
    for field, key in {**SIZE_KEYS, **family.keys}.items():
        section, _, name = field.rpartition(".")
        try:
            value = _read(given, key)
        except InvalidConfig as error:
            problems += error.problems
            continue
        if field in _MAY_BE_MISSING and value is None:
            continue
        if value is None:
            problems.append(f"{key} is missing{': it is null' * (key in config)}")
        else:
            (table.setdefault(section, {}) if section else table)[name] = value
    try:
        table |= read_windows(given, family.window)
    except InvalidConfig as error:
        problems += error.problems
    return (table, problems) if problems else (_complete_heads(table), problems)


_MAY_BE_MISSING = (
    "num_kv_heads", "head_dim", "rope_theta", "experts.normalized", "experts.scale", "experts.groups",
    "experts.groups_per_token", "experts.dense_layers", "experts.shared_ffn_size",
)  # fmt: skip
"""Fields with a default in `ModelShape`, or that follow from others."""


def _find_theta(config: Mapping[str, Any]) -> dict[str, Any]:
    """The base of the rotary wavelengths, where the table of the rotary embedding has one for all blocks."""
    tables = [config.get(key) for key in ("rope_parameters", "rope_scaling")]
    found = [table["rope_theta"] for table in tables if isinstance(table, dict) and table.get("rope_theta") is not None]
    return {"rope_theta": found[0]} if found else {}


def _read(given: Mapping[str, Any], key: str | Derived) -> Any:
    if not isinstance(key, Derived):
        return given.get(key)
    values = [given.get(each) for each in key.keys]
    try:
        return key.read(*values)
    except (TypeError, AttributeError):
        found = ", ".join(f"{name}={value!r}" for name, value in zip(key.keys, values, strict=True))
        raise InvalidConfig(f"{found}: no size follows from these") from None


def _complete_heads(table: dict[str, Any]) -> dict[str, Any]:
    """The table with the heads that `transformers` takes where a file says none: as wide as the model allows."""
    heads, hidden = table["num_heads"], table["hidden_size"]
    table.setdefault("num_kv_heads", heads)
    if "head_dim" not in table and type(heads) is type(hidden) is int and heads > 0 and hidden % heads:
        table["head_dim"] = hidden // heads
    return table
