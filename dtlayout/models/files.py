"""A model's sizes from wherever a user has them: a preset's name, a Hugging Face config.json, or a TOML file.

A TOML file has a section [model] with the fields of `ModelShape`, on top of the preset that its `name` names, if any;
a training config is such a file. Of a config.json only `models.families` are taken. No torch.
"""

from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from dtlayout import toml
from dtlayout.errors import InvalidConfig
from dtlayout.model_shape import ModelShape, RopeScaling
from dtlayout.models.families import FAMILIES, find_family
from dtlayout.models.presets import PRESETS

_HF_NAMES = {name: name for name in ("hidden_size", "head_dim", "vocab_size", "rope_theta")} | {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_size": "intermediate_size",
    "tied_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
}
"""Field of ModelShape → key of config.json."""


def find_model(text: str) -> ModelShape:
    """The model that `text` names; InvalidConfig if it is no preset and no file, or of no known family."""
    if text in PRESETS:
        return PRESETS[text]
    path = Path(text)
    if path.is_dir():
        path /= "config.json"
        if not path.exists():
            raise InvalidConfig(f"model {text!r} is a folder without a config.json; presets are {', '.join(PRESETS)}")
    if path.suffix not in (".json", ".toml"):
        import difflib  # only now: most names are known

        near = difflib.get_close_matches(text, PRESETS, n=1)
        advice = f"did you mean {near[0]}?" if near else f"presets are {', '.join(PRESETS)}"
        raise InvalidConfig(f"model {text!r} is no preset, config.json or TOML file; {advice}")
    import json  # only now: most models are presets

    try:
        content = path.read_text(encoding="utf-8")
        return parse_hf(json.loads(content), path.parent.name) if path.suffix == ".json" else parse_toml(content)
    except OSError as error:
        raise InvalidConfig(f"model {path} cannot be read: {error.strerror}") from None
    except InvalidConfig as error:
        raise InvalidConfig([f"model {path}: {problem}" for problem in error.problems]) from None
    except ValueError as error:  # not JSON, not TOML or not UTF-8
        raise InvalidConfig(f"model {path} is not {path.suffix[1:].upper()}: {error}") from None


def parse_hf(config: Any, name: str = "") -> ModelShape:
    """The sizes of a parsed config.json."""
    if not isinstance(config, dict):
        raise InvalidConfig("it is no table of sizes")
    problems = []
    family = str(config.get("model_type", "llama"))
    if family not in FAMILIES:
        problems.append(f"model_type={family!r} is not known; use one of {', '.join(FAMILIES)}")
    unknown = ("attention_bias", "mlp_bias", "use_sliding_window")
    problems += [f"{key}=true is not known" for key in unknown if config.get(key)]
    expected = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
    problems += [
        f"{key}={config[key]!r} is not known" for key, usual in expected.items() if config.get(key, usual) != usual
    ]
    values = {ours: config[theirs] for ours, theirs in _HF_NAMES.items() if config.get(theirs) is not None}
    values.setdefault("num_kv_heads", values.get("num_heads"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "rope_theta" in rope:
        values["rope_theta"] = rope["rope_theta"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        names = {f.name: f.name for f in fields(RopeScaling)}
        names["original_context"] = "original_max_position_embeddings"
        missing = [theirs for theirs in names.values() if theirs not in rope]
        problems += [f"rope_scaling.{key} is missing" for key in missing]
        if not missing:
            values["rope_scaling"] = {ours: rope[theirs] for ours, theirs in names.items()}
    elif kind != "default":
        problems.append(f"rope_scaling of type {kind!r} is not known; use default or llama3")
    required = [f.name for f in fields(ModelShape) if f.name in _HF_NAMES and f.default is MISSING]
    problems += [f"{_HF_NAMES[name]} is missing" for name in required if values.get(name) is None]
    if problems:
        raise InvalidConfig(problems)
    values = {"name": name or "own", "family": family, **FAMILIES[family].traits, **values}
    return toml.parse(values, ModelShape, "model")


def to_hf(model: ModelShape, number_format: str, max_seq_len: int | None = None) -> dict[str, Any]:
    """The config.json of a model whose weights are in `number_format`, such as "bfloat16".

    InvalidConfig if its family's does not say all that it is: a Llama with the biases of a Qwen2, for one.
    """
    config: dict[str, Any] = {theirs: getattr(model, ours) for ours, theirs in _HF_NAMES.items()}
    config |= {"architectures": [find_family(model.family).architecture], "model_type": model.family}
    config |= {"head_dim": model.head_width, "hidden_act": "silu", "torch_dtype": number_format}
    if max_seq_len is not None:
        config["max_position_embeddings"] = max_seq_len
    if model.rope_scaling is not None:
        scaling = asdict(model.rope_scaling)
        scaling["original_max_position_embeddings"] = scaling.pop("original_context")
        config["rope_scaling"] = {"rope_type": "llama3", **scaling}
    if parse_hf(config, model.name) != model:
        raise InvalidConfig(f"model {model.name} has what no config.json of model_type={model.family!r} says")
    return config


def parse_toml(content: str) -> ModelShape:
    """The sizes of a TOML file's [model]."""
    table = toml.loads(content).get("model")
    if not isinstance(table, dict):
        raise InvalidConfig("it has no section [model]")
    preset = PRESETS.get(str(table.get("name")))
    return toml.parse({**(asdict(preset) if preset else {}), "name": "own", **table}, ModelShape, "model")


def find_ends(folder: Path) -> list[int]:
    """Ids at which a Hugging Face folder's texts end, by its generation_config.json; none if it does not say.

    A chat model has several: an answer's and a document's.
    """
    import json  # only now, as above

    try:
        found = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [end for end in (found if isinstance(found, list) else [found]) if isinstance(end, int)]
