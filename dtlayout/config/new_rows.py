"""New rows: a model gets rows of embedding and head for tokens that its tokenizer has more, and for tp.

A new run that starts from a Hugging Face folder has as many rows as the tokenizer has ids, if these are more than the
folder's. If tp does not divide that number, some rows more fill it up: they are no tokens (`ModelShape.unused_rows`). A
run that goes on, or starts from another run, keeps the rows that were saved where tp divides them, and is filled up
anew where it does not. Nothing else changes where the config says `model.vocab_size` itself, or has an adapter.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import expand, find_path_problem, parse_json
from dtlayout.models.beside import CONFIG, TOKENIZER
from dtlayout.models.first_source import read_saved
from dtlayout.models.traced import FAMILY

_BYTES = 257
"""Ids of the tokenizer "bytes"."""


def add_rows(
    model: dict[str, Any], tables: Mapping[str, Any], folder: Path | None, begun: Path | None
) -> dict[str, Any]:
    """The sizes of a model with the rows that a run from `folder` has; `begun` is the folder of a run that goes on.

    `folder` is one of weights, a run or a checkpoint. The tables name a tokenizer already, where one is known.
    """
    asked, sizes = tables.get("model"), model.get("vocab_size")
    is_said = isinstance(asked, Mapping) and "vocab_size" in asked
    if model.get("adapter") is not None or model.get("family") == FAMILY or not isinstance(sizes, int):
        return model
    tp = _find_tp(tables)
    if (source := begun or folder) is not None and (saved := _read_rows(source)):
        num_rows, unused = saved["vocab_size"], saved.get("unused_rows", 0)
        is_same = sizes - model.get("unused_rows", 0) == num_rows - unused
        is_of_run = is_same or (not is_said and _has_folder(asked, folder))
        return {**model, **_fill_up(num_rows, unused, tp)} if is_of_run else model
    if folder is None or is_said or begun is not None or not (folder / CONFIG).is_file():
        return model
    data = tables.get("data")
    tokenizer = data.get("tokenizer") if isinstance(data, Mapping) else None
    num_ids = max(sizes, count_ids(tokenizer) if isinstance(tokenizer, str) else 0)
    rows = _fill_up(num_ids, 0, tp)
    return model if rows["vocab_size"] == sizes else {**model, **rows}


def _find_tp(tables: Mapping[str, Any]) -> int:
    """The degree of tp that the tables name; 1 for what is none, which is refused elsewhere."""
    layout = tables.get("layout")
    tp = layout.get("tp", 1) if isinstance(layout, Mapping) else 1
    return tp if type(tp) is int and tp > 0 else 1


def _fill_up(num_rows: int, unused: int, tp: int) -> dict[str, int]:
    """Rows that tp divides, of which `unused` or others are no tokens; as they are where tp divides them already."""
    num_ids = num_rows - unused
    if num_rows % tp and tp < num_ids:
        unused = -num_ids % tp
    return {"vocab_size": num_ids + unused, "unused_rows": unused}


def _has_folder(asked: Any, folder: Path | None) -> bool:
    """Whether the sizes of the model are those of a Hugging Face folder, which a run may have given more rows."""
    name = asked.get("name") if isinstance(asked, Mapping) else None
    place = folder if name is None else Path(name) if isinstance(name, str) and not find_path_problem(name) else None
    return place is not None and os.path.isfile(expand(str(place)) / CONFIG)


def _read_rows(source: Path) -> dict[str, int]:
    """The rows of the model of a run or a checkpoint; none where there is none, or it does not say them."""
    try:
        if (saved := read_saved(source)) is None:
            return {}
        return {name: int(saved.model[name]) for name in ("vocab_size", "unused_rows") if name in saved.model}
    except (InvalidConfig, TypeError, ValueError):  # said when it is loaded
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
