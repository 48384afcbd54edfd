"""A model's sizes from a preset's name, a Hugging Face config.json, or a TOML file.

A TOML file has a section [model] with fields of `ModelShape`. They go on top of the model that its `name` names, if
any. A training config is such a file. A config.json must be of one of `models.families`. No torch.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import expand, find_cache, parse_json, write_whole
from dtlayout.base.formatting import find_version, shorten
from dtlayout.models.families import BUILT_IN, FAMILIES, find_family
from dtlayout.models.family import SIZE_KEYS
from dtlayout.models.hf_config import UnknownKeys, parse_hf
from dtlayout.models.hf_experts import write_experts
from dtlayout.models.naming import NAME_KEY, name_model
from dtlayout.models.planned_families import REFUSED
from dtlayout.models.presets import PRESETS
from dtlayout.models.traced import FAMILY, VERSION, hash_code, is_trace, parse_trace, read_trace
from dtlayout.spec.model_shape import Experts, ModelShape

_WRITTEN = {each.name for each in fields(ModelShape) if each.default is not None}
"""Fields that dtlayout always writes into a config. Fields that may be None are left out, since TOML has no null."""
_OF_TRAINING = ("bias_rate", "balance_loss", "z_loss", "imbalance")
"""Fields of Experts that only training and predictions read: logits are the same whatever they are."""


def find_model(text: str) -> ModelShape:
    """The model that `text` names; InvalidConfig if it is no preset and no file, or of no known family."""
    if text in PRESETS:
        return PRESETS[text]
    path = _find_path(text)
    with _problems_of(path):
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            return parse_toml(content)
        config = parse_json(content)
        if is_trace(config):
            return parse_trace(config, str(path.absolute())).shape
        try:
            return name_model(parse_hf(config), config, path)
        except UnknownKeys as error:
            if not _has_class(config.get("model_type")):
                raise
            advice = (
                f"dtlayout trace {path} --output model.json reads off the code of transformers what it computes; use "
                f"--model model.json then"
            )
            raise InvalidConfig([*error.problems, advice]) from None
        except InvalidConfig:
            if isinstance(config, dict) and isinstance(kind := config.get("model_type"), str) and kind not in FAMILIES:
                if kind not in REFUSED:
                    return trace_model(config, path)
                with suppress(InvalidConfig):  # whose reason says less than the family's own
                    return trace_model(config, path)
                raise InvalidConfig(f"model_type={kind!r} is neither described nor traced: {REFUSED[kind]}") from None
            raise


def _has_class(kind: Any) -> bool:
    """True if `transformers` builds the models of a family: of a registered one it knows nothing."""
    family = BUILT_IN.get(kind)
    return family is not None and family is FAMILIES[kind] and family.has_class


def find_trained_model(text: str) -> ModelShape:
    """The model that `text` names, traced where its family is planned and not trained, if that can be done here.

    InvalidConfig as from `find_model`.
    """
    found = find_model(text)
    if text not in PRESETS and find_family(found.family).untrained:
        with suppress(InvalidConfig):  # a check of the config says why the family itself is not trained
            path, config = read_config(text)
            return trace_model(config, path)
    return found


def read_config(text: str) -> tuple[Path, dict[str, Any]]:
    """Path and content of the config.json that `text` names, or whose folder it names; InvalidConfig if none."""
    path = _find_path(text)
    with _problems_of(path):
        if path.suffix != ".json":
            raise InvalidConfig("it is no config.json")
        config = parse_json(path.read_text(encoding="utf-8"))
        if is_trace(config):
            raise InvalidConfig("it is a trace already")
        return path, config


def trace_model(config: Mapping[str, Any], path: Path, output: Path | None = None) -> ModelShape:
    """The model of a config.json, the file `path`, as its own code computes it.

    That takes torch, transformers and some seconds. The trace is kept in `output`, or in the user's cache, where it is
    found again.

    InvalidConfig with the reason if the model cannot be traced.
    """
    import hashlib  # only now: most models are described
    import json
    import pkgutil

    facts = [VERSION, config, find_version("transformers"), hash_code("tracing")]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    kept = output or find_cache() / "traces" / f"{digest[:16]}.json"
    if output is None and kept.is_file():
        with suppress(InvalidConfig):  # a damaged file is written again
            return name_model(read_trace(str(kept.absolute())).shape, config, path)
    trace = pkgutil.resolve_name("dtlayout.tracing.trace:trace_config")(config)
    shape = name_model(trace.shape, config, path)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, replace(trace, shape=shape).dumps())
    except OSError as error:
        raise InvalidConfig(
            f"{kept} cannot be written: {error.strerror}; dtlayout trace --output names another"
        ) from None
    read_trace.cache_clear()
    return replace(shape, trace=str(kept.absolute()))


def _find_path(text: str) -> Path:
    """The TOML or JSON file that `text` names, or the config.json of the folder; InvalidConfig if there is none."""
    with toml.problems_of("model"):
        path = expand(text)
    if os.path.isdir(path):  # Path's own raises where a parent folder may not be read
        path /= "config.json"
        if not os.path.exists(path):
            raise InvalidConfig(f"model {text!r} is a folder without a config.json; presets are {', '.join(PRESETS)}")
    if path.suffix not in (".json", ".toml"):
        raise InvalidConfig(describe_unknown(text))
    return path


def describe_unknown(text: str) -> str:
    """Reason why a text that is no preset names no model, with the nearest preset or all of them."""
    import difflib  # only now: most names are known

    near = difflib.get_close_matches(text, PRESETS, n=1)
    advice = f"did you mean {near[0]}?" if near else f"presets are {', '.join(PRESETS)}"
    return f"model {shorten(repr(text))} is no preset, config.json or TOML file; {advice}"


@contextmanager
def _problems_of(path: Path) -> Iterator[None]:
    """Inside, a file that cannot be read, and each problem of its content, is an InvalidConfig that names it."""
    try:
        yield
    except OSError as error:
        raise InvalidConfig(f"model {path} cannot be read: {error.strerror}") from None
    except InvalidConfig as error:
        raise InvalidConfig([f"model {path}: {problem}" for problem in error.problems]) from None
    except ValueError as error:  # not JSON, not TOML or not UTF-8
        raise InvalidConfig(f"model {path} is not {path.suffix[1:].upper()}: {error}") from None


def to_hf(model: ModelShape, number_format: str, max_seq_len: int | None = None) -> dict[str, Any]:
    """The config.json of a model whose weights are in `number_format`, such as "bfloat16", for `max_seq_len` tokens.

    A model with stretched rotary wavelengths is for as many tokens as these allow, if that is more. InvalidConfig if a
    config.json of its family cannot describe it: a Llama with the biases of a Qwen2, for instance.
    """
    if model.family == FAMILY:  # the model's own, in which no size has changed
        own = read_trace(model.trace).config
        return {**own, NAME_KEY: model.name, **dict.fromkeys({"torch_dtype", *own.keys() & {"dtype"}}, number_format)}
    if reason := find_family(model.family).untrained:
        raise InvalidConfig(f"model.family={model.family} is planned, not trained: {reason}; no config.json is written")
    config: dict[str, Any] = {theirs: getattr(model, ours) for ours, theirs in SIZE_KEYS.items()}
    config |= {"architectures": [find_family(model.family).architecture], "model_type": model.family}
    config |= {"head_dim": model.head_width, "hidden_act": "silu", "torch_dtype": number_format}
    config |= {NAME_KEY: model.name}
    if max_seq_len is not None:
        config["max_position_embeddings"] = max_seq_len
    if model.rope_scaling is not None:
        scaling = asdict(model.rope_scaling)
        stretched = int(scaling["factor"] * scaling["original_context"])
        config["max_position_embeddings"] = max(max_seq_len or 0, stretched)  # as far as the wavelengths reach
        scaling["original_max_position_embeddings"] = scaling.pop("original_context")
        config["rope_scaling"] = {"rope_type": "llama3", **scaling}
    defaults = find_family(model.family).defaults
    if find_family(model.family).window is not None:
        config["sliding_window"] = model.window or None
    elif defaults.get("sliding_window") is not None and "use_sliding_window" not in defaults:
        config["sliding_window"] = None  # without the key blocks from some number on have a window
    if model.experts is not None:
        config |= write_experts(model.experts, find_family(model.family))
    if strip_training(parse_hf(config, model.name)) != strip_training(model):
        raise InvalidConfig(f"model {model.name} has what no config.json of model_type={model.family!r} says")
    return config


def strip_training(model: ModelShape) -> ModelShape:
    """The model with the defaults of what only training and predictions read: two that compute the same are equal."""
    if model.experts is None:
        return model
    defaults: dict[str, Any] = {each.name: each.default for each in fields(Experts) if each.name in _OF_TRAINING}
    return replace(model, experts=replace(model.experts, **defaults))


def parse_toml(content: str) -> ModelShape:
    """The sizes in a TOML file's [model], whose name may be a preset or the path of a Hugging Face model."""
    table = toml.loads(content).get("model")
    if not isinstance(table, dict):
        raise InvalidConfig("it has no section [model]")
    return toml.parse({"name": "own", **complete(table, (".json",))}, ModelShape, "model")


def complete(table: dict[str, Any], suffixes: Sequence[str] = (".json", ".toml")) -> dict[str, Any]:
    """A [model] with the missing sizes of the model that its name names: a preset, a Hugging Face folder or a file.

    A table that has every size already, such as a run's own config, stays as it is, whatever its name means now. Of
    experts and other tables in it, too, only what is missing comes from that model.
    """
    name = table.get("name")
    if not isinstance(name, str) or table.keys() >= _WRITTEN:
        return table
    if name in PRESETS:
        return _fill_in(table, asdict(PRESETS[name]))
    path = expand(name)
    is_folder = bool(name) and os.path.isfile(path / "config.json")
    if not is_folder and not (path.suffix in suffixes and os.path.isfile(path)):
        return table
    found = find_trained_model(str(path.absolute()))  # an absolute path is never a preset's name
    return {**_fill_in(table, asdict(found)), "name": found.name}


def _fill_in(table: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """`found` with the entries of `table` in their places, also inside of tables that both have."""
    inner = {
        key: {**found[key], **value} for key, value in table.items()
        if isinstance(value, dict) and isinstance(found.get(key), dict)
    }  # fmt: skip
    return {**found, **table, **inner}
