"""A Hugging Face config.json as `transformers` reads it: defaults by family; keys with unknown effects are refused.

Keys with which the family's code in `transformers` computes are read here, or must have the value that changes nothing.
Keys that only other models know are refused if their names say that they may change sizes or numbers; other keys pass.
Semantics are those of `transformers` 5, unless something else is said. No torch.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import shorten
from dtlayout.models.families import FAMILIES
from dtlayout.models.family import COMMON_DEFAULTS, SIZE_KEYS, Family
from dtlayout.models.hf_experts import list_expert_keys, read_experts
from dtlayout.models.hf_planned import list_planned_keys, read_planned
from dtlayout.models.hf_text_part import TEXT_PARTS, find_text_part
from dtlayout.models.hf_windows import list_window_keys, read_windows
from dtlayout.models.planned_families import REFUSED
from dtlayout.spec.model_shape import ModelShape, RopeScaling

_LLAMA3_NAMES = {f.name: f.name for f in fields(RopeScaling)} | {"original_context": "original_max_position_embeddings"}
"""Field of RopeScaling → key of the table of the rotary embedding."""
_ROPE_KEYS = {
    *_LLAMA3_NAMES.values(), "rope_type", "type", "rope_theta", "partial_rotary_factor", "attention_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor",
}  # fmt: skip
"""Keys of the rotary embedding's table for any rope_type; keys of another type than the table's own change nothing."""
_READ = {
    *SIZE_KEYS.values(), "model_type", "architectures", "hidden_act", "rope_parameters", "rope_scaling",
    "partial_rotary_factor", "max_position_embeddings", "original_max_position_embeddings", "layer_types",
    "use_sliding_window", "sliding_window", "max_window_layers", "auto_map", "text_config",
}  # fmt: skip
_HARMLESS = {
    "chunk_size_feed_forward", "context_window_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "_from_model_config", "guidance_scale", "initializer_range", "is_llama_config", "keys_to_ignore_at_inference",
    "layer_norm_eps", "length_penalty", "logits_to_keep", "max_length", "max_sequence_length", "min_length",
    "model_max_length", "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "num_beam_groups", "num_beams", "num_labels", "num_logits_to_keep", "num_return_sequences",
    "output_hidden_states", "prefill_chunk_size", "pretraining_tp", "remove_invalid_values", "repetition_penalty",
    "tie_encoder_decoder", "tie_last_hidden_states", "transformers.js_config", "typical_p", "use_cache",
}  # fmt: skip
"""Keys that sound as if they changed sizes or numbers, but that no computation of a loss or of logits reads."""
_SUSPICIOUS = re.compile(
    r"drop|bias|norm|window|chunk|soft_?cap|clip|scal|multipl|_mult$|factor|expert|expan|moe|router|rank|rope|rotary|"
    r"theta|quant|compress|prun|head|dense|activation|causal|direction|attn_temp|layer|block|group|ssm|mamba|conv|sparse|"
    r"residual|parallel|draft|eagle|medusa|specul|text_|vision|audio|adapter|lora|nope|alibi|qk|kv_|encoder|cross|gat(e|ing)|"
    r"swiglu|mlp|topk|scoring|sink|indexer|_idxs$|pos_emb|position_embed|local_attention|attention_types?$|multi_query|"
    r"altup|hc_|d_model|d_inner|dff|n_embd|n_inner|_act$|mup|wide|ngram|patch|jitter|lambda|time_step|k_eq_v|"
    r"_config$|^num_|_size(_|$)|_dim(_|$)|^dim_|_width(_|$)|_eps$|^eps$"
)
_NEUTRAL: tuple[Any, ...] = (None, False, "", 0)
_NEUTRAL_FACTOR = re.compile(r"scal|multipl|factor")
_USUAL = {"hidden_act": ("silu", "swish"), "partial_rotary_factor": (1.0, None)}
"""Key → values that the blocks here compute."""


class UnknownKeys(InvalidConfig):
    """A config.json of a family that is known, with keys that may compute what no description here does."""


def parse_hf(config: Any, name: str = "") -> ModelShape:
    """The sizes of a model, from its parsed config.json; missing keys get the family's defaults in `transformers`.

    `name` becomes the model's name, and an empty one becomes "own"; `name_model` finds a better one. InvalidConfig if
    the model is of another family or architecture. Otherwise it has a line for each missing size, and for each key that
    may change the model in a way not computed here; it is UnknownKeys if no size is missing.
    """
    if not isinstance(config, dict):
        raise InvalidConfig("it is no table of sizes")
    config = find_text_part(config) or config
    family = _find_family(config)
    config, problems = _join_synonyms(config, family)
    if family.untrained:
        return _parse_planned(config, family, problems, name)
    values: dict[str, Any] = {}
    defaults = {**COMMON_DEFAULTS, **family.defaults}
    for ours, theirs in SIZE_KEYS.items():
        if theirs in config or theirs in defaults:
            values[ours] = config.get(theirs, defaults.get(theirs))
    if values["num_kv_heads"] is None:
        values["num_kv_heads"] = values.get("num_heads")
    required = [SIZE_KEYS[each.name] for each in fields(ModelShape) if _is_missing(each, values)]
    missing = [f"{key} is missing{': it is null' * (key in config)}" for key in required]
    problems += missing
    problems += _find_unknown(config, family)
    if values["head_dim"] is None and family.defaults.get("head_dim") is not None:
        problems.append(
            f"head_dim=null is not known; {family.name} takes {family.defaults['head_dim']} without the key"
        )
    windows: dict[str, Any] = {}
    if family.window is None:
        problems += _find_windows(config, defaults, values.get("num_layers"))
    else:
        windows, window_problems = _read_windows(config, family)
        problems += window_problems
    rope, rope_problems = _read_rope(config, values["rope_theta"], defaults)
    experts, expert_problems = read_experts(config, family)
    if problems := problems + rope_problems + expert_problems:
        raise InvalidConfig(problems) if missing else UnknownKeys(problems)
    table = {"name": name or "own", "family": family.name, **family.traits, **values, **rope, **windows}
    if experts:
        table["experts"] = {**family.traits.get("experts", {}), **experts}
    try:
        shape = toml.parse(table, ModelShape, "model")
    except InvalidConfig as error:
        raise InvalidConfig(error.problems + _list_assumed(config, defaults, family)) from None
    if family.heads_divide_width and shape.hidden_size % shape.num_heads:
        raise InvalidConfig(
            f"hidden_size={shape.hidden_size} is no multiple of num_attention_heads={shape.num_heads}, and "
            f"transformers opens no such {family.name}, whatever head_dim says"
        )
    return shape


def _parse_planned(config: dict[str, Any], family: Family, problems: list[str], name: str) -> ModelShape:
    """The sizes of a model that is planned and not trained."""
    table, found = read_planned(config, family)
    if problems := [*problems, *found, *_find_unknown(config, family)]:
        raise UnknownKeys(problems)
    table |= {"name": name or "own", "family": family.name}
    try:
        return toml.parse(table, ModelShape, "model")
    except InvalidConfig as error:
        raise InvalidConfig(error.problems + _list_assumed(config, family.defaults, family)) from None


def _read_windows(config: dict[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    try:
        return read_windows({**family.defaults, **config}, family.window), []
    except InvalidConfig as error:
        return {}, error.problems


def _join_synonyms(config: dict[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    """The config with one key of each two that mean the same, and a problem for each two that differ."""
    joined, problems = dict(config), []
    for other, key in family.synonyms.items():
        if other in joined and joined.setdefault(key, value := joined.pop(other)) != value:
            problems.append(
                f"{key}={joined[key]!r} and {other}={value!r} mean the same and differ; remove the wrong one"
            )
    return joined, problems


def _is_missing(each: Any, values: Mapping[str, Any]) -> bool:
    return each.name in SIZE_KEYS and each.default is MISSING and values.get(each.name) is None


def _list_assumed(config: dict[str, Any], defaults: Mapping[str, Any], family: Family) -> list[str]:
    """A line with the sizes that are not in the file but come from defaults; no line if there are none."""
    sizes = [key for key in SIZE_KEYS.values() if key not in config and type(defaults.get(key)) is int]
    taken = ", ".join(f"{key}={defaults[key]}" for key in sizes)
    return [f"{taken}: not in the file, and what transformers takes for {family.name}"] if taken else []


def _find_family(config: dict[str, Any]) -> Family:
    """The family whose causal language model the file describes; InvalidConfig for any other model."""
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(each, str) for each in architectures):
        raise InvalidConfig(f"architectures={architectures!r} must be a list of names")
    by_architecture = {each.architecture.lower(): each for each in reversed(FAMILIES.values())}
    kind = config.get("model_type")
    if kind is None and len(architectures) == 1:
        kind = getattr(by_architecture.get(architectures[0].lower()), "name", None)
    if kind is None:
        named = f", and architectures={architectures} names none" if architectures else ""
        raise InvalidConfig(f"model_type is missing{named}; use one of {', '.join(FAMILIES)}")
    if config.get("text_config") is not None:
        others = [key for key in config if key.endswith("_config") and key != "text_config"]
        raise InvalidConfig(
            f"model_type={kind!r} wraps a text model in text_config{' beside ' * bool(others)}{', '.join(others)}, and "
            f"of such models only the text of {', '.join(TEXT_PARTS)} is known: plan that part by a config.json that "
            f"holds what text_config does"
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        reason = f": {REFUSED[kind]}" if isinstance(kind, str) and kind in REFUSED else ""
        raise InvalidConfig(f"model_type={kind!r} is not known{reason}; use one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    if strange := [each for each in architectures if each.lower() != family.architecture.lower()]:
        raise InvalidConfig(
            f"architectures names {', '.join(strange)}, and model_type={kind!r} is only known as "
            f"{family.architecture}; draft models and models with another head or none have other weights"
        )
    by_task = config.get("auto_map")
    own_code = by_task.get("AutoModelForCausalLM") if isinstance(by_task, dict) else None
    if isinstance(own_code, str) and own_code.rpartition(".")[2].lower() != family.architecture.lower():
        raise InvalidConfig(f"auto_map names {own_code}, the model's own code; only {family.architecture} is known")
    return family


def _find_unknown(config: dict[str, Any], family: Family) -> Iterator[str]:
    """Problems with keys that change sizes or numbers in ways not computed here, or whose names sound like that."""
    usual = ({} if family.untrained else _USUAL) | dict(family.allowed)
    for key, values in usual.items():
        if key in config and config[key] not in values:
            yield f"{key}={config[key]!r} is not known; {values[0]!r} is"
    passing = {*_READ, *_HARMLESS, *usual, *family.ignored_keys, *list_expert_keys(family)}
    passing |= list_planned_keys(family) if family.untrained else list_window_keys(family.window)
    for key, value in config.items():
        if key in passing or not _SUSPICIOUS.search(key):
            continue
        is_neutral = value in _NEUTRAL or value in ([], {}) or (value == 1 and bool(_NEUTRAL_FACTOR.search(key)))
        if not is_neutral:
            told = f"{key}={_shorten(value)} is not known, and may change sizes or numbers"
            yield f"{told}; take it out of a copy of the file if it changes none of a {family.name}"


def _shorten(value: Any) -> str:
    """A value as JSON writes it, cut to 60 characters."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return shorten(text, 60)


def _find_windows(config: dict[str, Any], defaults: Mapping[str, Any], num_layers: Any) -> Iterator[str]:
    """Problems with blocks that would not attend to all earlier tokens."""
    kinds, has_windows = config.get("layer_types"), "sliding_window" in defaults
    is_switched = "use_sliding_window" in defaults or not has_windows
    # Mixtral and Qwen3-MoE have a window in each block or in none, and do not ask what kind a block is.
    is_everywhere = has_windows and "max_window_layers" not in defaults
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            yield f"layer_types={_shorten(kinds)} must name each of num_hidden_layers={num_layers} blocks"
        elif other := [each for each in kinds if each != "full_attention"]:
            yield f"layer_types names {other[0]!r}; full_attention alone is known"
        if not is_everywhere:
            return
    is_used = config.get("use_sliding_window", defaults.get("use_sliding_window"))
    if is_used and "use_sliding_window" not in defaults:
        yield f"use_sliding_window={_shorten(is_used)} is not known of {config.get('model_type')}"
        return
    window = config.get("sliding_window", defaults.get("sliding_window") if is_used or not is_switched else None)
    if window is None or (is_used is False and is_switched):
        return
    first = 0 if is_everywhere else config.get("max_window_layers", defaults.get("max_window_layers", 0))
    if not isinstance(first, int) or not isinstance(num_layers, int) or first < num_layers:
        off = "use_sliding_window=false" if is_switched else "sliding_window=null"
        yield f"sliding_window={window!r} is on in blocks from {first} on; use {off} to plan without"


def _read_rope(config: dict[str, Any], theta: Any, defaults: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields of ModelShape about the rotary embedding, and problems with them.

    `rope_scaling` goes before `rope_parameters`, which transformers 5 writes. Keys inside the table go before keys
    beside it.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key) or {}
    if not isinstance(rope, dict):
        return {}, [f'{key}={_shorten(rope)} must be a table, such as {{"rope_type": "default"}}']
    problems = [f"{key}.{each} is not known" for each in rope if each not in _ROPE_KEYS]
    values: dict[str, Any] = {"rope_theta": rope.get("rope_theta", theta)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) not in _USUAL["partial_rotary_factor"]:
        problems.append(f"{key}.partial_rotary_factor={rope['partial_rotary_factor']!r} is not known; 1.0 is")
    if kind == "llama3":
        beside = config.get("original_max_position_embeddings")
        longest = config.get("max_position_embeddings", defaults["max_position_embeddings"])
        given = {**({"original_max_position_embeddings": longest} if longest is not None else {}), **rope}
        given |= {"original_max_position_embeddings": beside} if beside is not None else {}
        problems += [f"{key}.{theirs} is missing" for theirs in _LLAMA3_NAMES.values() if theirs not in given]
        values["rope_scaling"] = {ours: given.get(theirs) for ours, theirs in _LLAMA3_NAMES.items()}
    elif kind != "default":
        problems.append(f"{key} of type {kind!r} is not known; use default or llama3")
    return values, problems
