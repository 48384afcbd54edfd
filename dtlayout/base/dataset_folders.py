"""Folders that hold a dataset with splits: clones of datasets of the hub, and those that `datasets` has saved.

Splits are found in one of these ways, the first that a folder has:
1. `dataset_dict.json` or `state.json`, which `save_to_disk` writes;
2. the `configs` of its card, the YAML at the begin of README.md;
3. names of files: each one names a split, as `train-00000-of-00002.parquet`, `data/test.jsonl` or `dev/a.txt` do. One
   file that names none is enough for all of them to be one split: "how to train.txt" may be a text.
"""

import glob
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtlayout.base.errors import DataError
from dtlayout.base.files import parse_json
from dtlayout.base.formatting import plural
from dtlayout.base.source_names import (
    HELD_OUT_SPLIT,
    LOCAL_SPLIT,
    STDLIB,
    SUFFIXES,
    find_kind,
    is_hub_name,
    is_unread_data,
    split_config,
)

CARD = "README.md"
_DICT, _STATE = "dataset_dict.json", "state.json"
_ABOUT = {"dataset_info.json", "dataset_infos.json"}
"""Files of a dataset that hold no documents."""
_KEYWORDS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""Word in a name → split."""
_NUMBERS = re.compile(r"([-_. ]?(of|part|shard)?[-_. ]?\d+)*$")

Splits = dict[str, list[Path]]


def find_held_out_split(source: str, asked: str) -> str:
    """Split that [validation] reads: `asked`, or if that is empty "validation" where the source has it.

    Local files have it only if a folder's splits say so; else they have "train", also where "validation" is asked for:
    configs of older runs say so.
    """
    if source != STDLIB and is_hub_name(source):
        return asked or HELD_OUT_SPLIT
    if asked not in ("", HELD_OUT_SPLIT):
        return asked
    path, config = (Path(), "") if source == STDLIB else split_config(source)
    return HELD_OUT_SPLIT if HELD_OUT_SPLIT in _try_splits(path, config) else LOCAL_SPLIT


def _try_splits(folder: Path, config: str) -> Splits:
    """Splits of a folder; none where it is no folder, or has an error that is said when it is read."""
    try:
        return find_splits(folder, config) if folder.name and folder.is_dir() else {}
    except DataError:
        return {}


def find_splits(folder: Path, config: str = "") -> Splits:
    """Split → files in reading order; one split, "train", for a folder that has no others.

    `config` names one of several configs of a card. DataError for a card that is none, for one that has no such config,
    and where some data would be left out that nobody has named.
    """
    if saved := _find_saved(folder):
        return saved
    if configs := _read_configs(folder):
        return _find_of_config(folder, _choose(configs, config, folder))
    if config:
        raise DataError(f"{str(folder)!r} has no config {config!r}: its card {CARD} names none")
    files = sorted(list_folder(folder), key=Path.as_posix)
    return _find_by_names(folder, files) or {LOCAL_SPLIT: files}


def list_folder(folder: Path) -> list[Path]:
    """Files below a folder that can be read, linked folders included; DataError if some data would be left out."""
    found, unread, seen = list[Path](), list[Path](), set[str]()
    for place, subfolders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        subfolders[:] = [] if real in seen else [name for name in subfolders if not name.startswith(".")]
        shown = [name for name in names if not name.startswith(".") and name not in _ABOUT]
        files = [Path(place, name) for name in shown if real not in seen]
        seen.add(real)  # a link may lead back
        found += [file for file in files if find_kind(file)[0] and file.is_file()]
        unread += [file for file in files if is_unread_data(file)]
    if unread:
        raise DataError(
            f"{str(folder)!r} holds {plural(len(unread), 'file')} that cannot be read, such as {str(min(unread))!r}, "
            f"beside {plural(len(found), 'file')} that can; unpack or convert them to one of {SUFFIXES}, or choose "
            f"files with a glob such as '**/*.jsonl'"
        )
    return found


def _find_saved(folder: Path) -> Splits:
    if (folder / _DICT).is_file():
        names = _read(folder / _DICT).get("splits")
        if not isinstance(names, list):
            raise DataError(f"{str(folder / _DICT)!r} names no splits")
        return {str(name): _list_saved(folder / str(name)) for name in names}
    if (folder / _STATE).is_file() and (folder / "dataset_info.json").is_file():
        split = _read(folder / _STATE).get("_split") or "train"
        return {str(split): _list_saved(folder)}
    return {}


def _list_saved(folder: Path) -> list[Path]:
    """Files of one saved dataset, in its order."""
    found = _read(folder / _STATE).get("_data_files")
    if not isinstance(found, list) or not all(isinstance(each, dict) and "filename" in each for each in found):
        raise DataError(f"{str(folder / _STATE)!r} names no files")
    return [folder / Path(str(each["filename"])).name for each in found]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{str(path)!r} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _read_configs(folder: Path) -> list[Mapping[str, Any]]:
    """The configs of the folder's card that name files or a folder; none without a card."""
    try:
        text = (folder / CARD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    head = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    if head is None:
        return []
    import yaml  # only now: few folders have a card

    try:
        card = yaml.safe_load(head[1])
    except yaml.YAMLError as error:
        raise DataError(
            f"{str(folder / CARD)!r} begins with what is no YAML: {' '.join(str(error).split())}"
        ) from error
    configs = card.get("configs") if isinstance(card, dict) else None
    if not isinstance(configs, list):
        return []
    return [each for each in configs if isinstance(each, dict) and ("data_files" in each or "data_dir" in each)]


def _choose(configs: Sequence[Mapping[str, Any]], asked: str, folder: Path) -> Mapping[str, Any]:
    """The config that is asked for; else the default one, or the only one."""
    named = {str(each.get("config_name", "default")): each for each in configs}
    default = next((name for name, each in named.items() if each.get("default") is True), "default")
    name = asked or (default if default in named or len(named) > 1 else next(iter(named)))
    if name not in named:
        what = f"has no config {asked!r}" if asked else "has several configs"
        raise DataError(f"{str(folder)!r} {what}; use {str(folder)!r}:NAME with one of {', '.join(named)}")
    return named[name]


def _find_of_config(folder: Path, config: Mapping[str, Any]) -> Splits:
    base = _inside(folder, str(config.get("data_dir", "")))
    splits: Splits = {}
    for split, patterns in _list_patterns(config.get("data_files", "**")):
        found = [Path(name) for pattern in patterns for name in sorted(_match(base, pattern))]
        if not found:
            raise DataError(
                f"the card of {str(folder)!r} names {patterns[0]!r} for split {split!r}, which no file matches"
            )
        splits.setdefault(split, []).extend(dict.fromkeys(found))
    return splits


def _match(base: Path, pattern: str) -> Iterator[str]:
    if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
        raise DataError(f"the card of {str(base)!r} names {pattern!r}, which is outside of the folder")
    for name in glob.glob(str(Path(glob.escape(str(base)), pattern)), recursive=True):
        if Path(name).is_file() and Path(name).name != CARD:
            yield name


def _inside(folder: Path, name: str) -> Path:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DataError(f"the card of {str(folder)!r} names {name!r}, which is outside of the folder")
    return folder / name


def _list_patterns(data_files: Any) -> Iterator[tuple[str, list[str]]]:
    """Split and patterns of `data_files`, which may be a pattern, a list of them, or have a table for each split."""
    if isinstance(data_files, str):
        yield "train", [data_files]
    elif isinstance(data_files, dict):
        for split, patterns in data_files.items():
            yield str(split), [patterns] if isinstance(patterns, str) else list(map(str, patterns))
    elif isinstance(data_files, list) and all(isinstance(each, str) for each in data_files):
        yield "train", data_files
    elif isinstance(data_files, list) and all(isinstance(each, dict) and "path" in each for each in data_files):
        for each in data_files:
            paths = each["path"]
            yield str(each.get("split", "train")), [paths] if isinstance(paths, str) else list(map(str, paths))
    else:
        raise DataError(f"a card's data_files is {json.dumps(data_files, default=str)[:80]}, which names no files")


def _find_by_names(folder: Path, files: Sequence[Path]) -> Splits:
    splits: Splits = {}
    for file in files:
        split = _name_split(file.relative_to(folder))
        if split is None:
            return {}
        splits.setdefault(split, []).append(file)
    return splits


def _name_split(path: Path) -> str | None:
    """Split that a relative path names: its file's name at the begin or the end, or else one of its folders.

    >>> [_name_split(Path(name)) for name in ("train-00000-of-00002.parquet", "dev/a.txt", "a_test.json", "latest.txt")]
    ['train', 'validation', 'test', None]
    """
    stem = path.name.split(".")[0].lower()
    words = [word for word in re.split(r"[-_ ]", _NUMBERS.sub("", stem)) if word]
    for word in [*words[:1], *words[-1:]]:
        if word in _KEYWORDS:
            return _KEYWORDS[word]
    folders = [_KEYWORDS[part.lower()] for part in reversed(path.parts[:-1]) if part.lower() in _KEYWORDS]
    return folders[0] if folders else None
