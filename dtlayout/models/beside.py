"""The files beside the weights in a Hugging Face folder, and the parts of them that training changes. No torch.

Base: the folder that a model came from, or the files of it that a run has kept. An export has the base's files. Changed
in them is only what no longer holds: sizes and the number format in config.json, and where texts end if that is read
differently.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import find_inside, parse_json
from dtlayout.models.files import strip_training, to_hf
from dtlayout.models.hf_config import parse_hf
from dtlayout.spec.model_shape import ModelShape

CONFIG = "config.json"
GENERATION = "generation_config.json"
KEPT = "kept"
"""Folder in a run's folder with the base of its exports."""
TOKENIZER = "tokenizer.json"
TEMPLATE_NAME = "chat_template.jinja"
_SETTINGS = "tokenizer_config.json"
_MODEL_FILES = (CONFIG, GENERATION)
_TOKENIZER_FILES = (
    TOKENIZER, _SETTINGS, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", TEMPLATE_NAME, "chat_template.json",
)  # fmt: skip
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", _SETTINGS)
"""Files of a tokenizer in a folder, also in forms that are not read here."""
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")


def find_model_files(folder: Path) -> dict[str, Path]:
    """Name → file, for a folder's config.json and generation_config.json, as far as it has them."""
    return _find(folder, _MODEL_FILES)


def find_tokenizer_files(folder: Path) -> dict[str, Path]:
    """Name → file, for a folder's tokenizer, its settings and its chat templates, as far as it has them.

    InvalidConfig if a link leads out of the folder.
    """
    return _find(folder, _list_tokenizer_files(folder))


def find_named_tokenizer(tokenizer: Path) -> dict[str, Path]:
    """Name → file, for the tokenizer that a user names and the files beside it; a file of another name counts alone.

    InvalidConfig if a link beside it leads out of the folder and out of the tokenizer's real folder.
    """
    if tokenizer.name != TOKENIZER:
        return {TOKENIZER: tokenizer}
    return _find(tokenizer.parent, _list_tokenizer_files(tokenizer.parent), tokenizer.resolve().parent)


def _list_tokenizer_files(folder: Path) -> list[str]:
    templates = sorted(folder.glob("additional_chat_templates/*.jinja"))
    return [*_TOKENIZER_FILES, *(f"{path.parent.name}/{path.name}" for path in templates)]


def _find(folder: Path, names: Sequence[str], *others: Path) -> dict[str, Path]:
    return {name: find_inside(folder, name, *others) for name in names if (folder / name).is_file()}


def has_other_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer, but no tokenizer.json."""
    return not os.path.isfile(folder / TOKENIZER) and any(os.path.isfile(folder / name) for name in _OTHER_TOKENIZERS)


def read_table(file: Path) -> dict[str, Any]:
    """The table in a JSON file; empty if there is none that can be read."""
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def find_end_token(folder: Path) -> str | None:
    """The token that ends answers, the `eos_token` of a folder's tokenizer; None if it names none."""
    for name in (_SETTINGS, "special_tokens_map.json"):
        token = read_table(folder / name).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token:
            return token
    return None


def find_ends(folder: Path) -> list[int]:
    """Ids that end texts, by a Hugging Face folder's generation_config.json; none if it does not say.

    Without that file config.json says it. A chat model has several: one for an answer and one for a document.
    """
    has_generation = (folder / GENERATION).is_file()
    found = read_table(folder / (GENERATION if has_generation else CONFIG)).get("eos_token_id")
    return [end for end in (found if isinstance(found, list) else [found]) if type(end) is int]


def find_sampling(folder: Path) -> dict[str, float]:
    """Temperature, top_p and top_k that a Hugging Face folder's generation_config.json names, as far as it does.

    `do_sample: false` there is temperature 0, the likeliest token.
    """
    said = read_table(folder / GENERATION)
    kinds = {"temperature": (int, float), "top_p": (int, float), "top_k": (int,)}
    found = {name: said[name] for name, kind in kinds.items() if type(said.get(name)) in kind}
    if said.get("do_sample") is False:
        found["temperature"] = 0
    return found


def find_context(folder: Path) -> int | None:
    """Tokens of the longest text that a Hugging Face folder's model is made for; None if its config.json says none."""
    found = read_table(folder / CONFIG).get("max_position_embeddings")
    return found if type(found) is int else None


def write_ids(table: Mapping[str, Any], begin: int | None, ends: Sequence[int]) -> dict[str, Any]:
    """A config.json or generation_config.json with these ids for the begin and the end of texts."""
    end = list(ends) if len(ends) > 1 else next(iter(ends), None)
    return {**table, "bos_token_id": begin, "eos_token_id": end}


def update_config(
    base: Mapping[str, Any], model: ModelShape, number_format: str, max_seq_len: int | None
) -> dict[str, Any]:
    """The base's config.json, changed for the trained model, and for texts of `max_seq_len` tokens if that is known.

    InvalidConfig if no config.json can describe the model.
    """
    new = to_hf(model, number_format, max_seq_len)
    try:
        old = to_hf(parse_hf(dict(base), model.name), number_format)
    except InvalidConfig:
        return new
    config = dict(base)
    if any(new.get(key) != old.get(key) for key in _ROPE):
        config = {key: value for key, value in config.items() if key not in _ROPE}
        config |= {key: new[key] for key in _ROPE if key in new}
    kept = (*_ROPE, "max_position_embeddings", "torch_dtype")
    config |= {key: value for key, value in new.items() if key not in kept and value != old.get(key)}
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = number_format
    known = config.get("max_position_embeddings")
    if max_seq_len is not None and isinstance(known, int) and known < max_seq_len:
        config["max_position_embeddings"] = max_seq_len
    try:
        return config if strip_training(parse_hf(config, model.name)) == strip_training(model) else new
    except InvalidConfig:  # the base says a size by a synonym of the key that has changed
        return new
