"""New rows: a folder's model gets rows of embedding and head for tokens that its tokenizer has more, and for tp.

A new run that starts from a Hugging Face folder has as many rows as the tokenizer has ids, if these are more than the
folder's. If tp does not divide that number, some rows more fill it up: they are no tokens (`ModelShape.unused_rows`). A
run that has begun keeps the rows that it began with. Nothing changes where the config says `model.vocab_size` itself,
or has an adapter.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import expand, parse_json
from dtlayout.models.beside import CONFIG, TOKENIZER
from dtlayout.models.traced import FAMILY

_BYTES = 257
"""Ids of the tokenizer "bytes"."""


def add_rows(
    model: dict[str, Any], tables: Mapping[str, Any], folder: Path | None, begun: Path | None
) -> dict[str, Any]:
    """The sizes of a model with the rows that a run from `folder` has; `begun` is the folder of a run that goes on.

    `model` has the sizes of `folder`. The tables name a tokenizer already, where one is known.
    """
    asked, sizes = tables.get("model"), model.get("vocab_size")
    is_said = isinstance(asked, Mapping) and "vocab_size" in asked
    is_plain = model.get("adapter") is None and model.get("family") != FAMILY
    if folder is None or is_said or not is_plain or not isinstance(sizes, int) or not (folder / CONFIG).is_file():
        return model
    if begun is not None:
        return {**model, **_read_rows(begun)}
    data, layout = tables.get("data"), tables.get("layout")
    tokenizer = data.get("tokenizer") if isinstance(data, Mapping) else None
    num_ids = max(sizes, count_ids(tokenizer) if isinstance(tokenizer, str) else 0)
    tp = layout.get("tp", 1) if isinstance(layout, Mapping) else 1
    unused = -num_ids % tp if type(tp) is int and 0 < tp < num_ids else 0
    return model if num_ids + unused == sizes else {**model, "vocab_size": num_ids + unused, "unused_rows": unused}


def _read_rows(run: Path) -> dict[str, int]:
    """The rows of the model of a run's own config; none where it does not say them."""
    try:
        said = toml.read(run / "config.toml", "config")["model"]
        return {name: int(said[name]) for name in ("vocab_size", "unused_rows") if name in said}
    except (InvalidConfig, KeyError, TypeError, ValueError):
        return {}


def count_ids(tokenizer: str) -> int:
    """One more than the largest id of a tokenizer; 0 where it cannot be read, which is said when it is opened."""
    if tokenizer == "bytes":
        return _BYTES
    try:
        path = expand(tokenizer)
        found = parse_json((path / TOKENIZER if os.path.isdir(path) else path).read_text(encoding="utf-8"))
        vocab = found["model"]["vocab"]
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        added = (each["id"] for each in found.get("added_tokens") or ())
        return max([-1, *ids, *added]) + 1
    except (OSError, ValueError, KeyError, TypeError, InvalidConfig):
        return 0
