"""Files that go along with exported weights: config.json, tokenizer, chat template, and where texts end. No torch.

Base: a Hugging Face folder, or RUN/kept, in which a run keeps these files from its start on. So an export needs neither
the folder that a run came from nor the working directory that its config's paths began in.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dtlayout.base.errors import CheckpointError
from dtlayout.base.files import expand
from dtlayout.config.config import Config
from dtlayout.config.sections import DataConfig
from dtlayout.data.tokenizer import Tokenizer, find_file, load_tokenizer
from dtlayout.models.beside import (
    CONFIG,
    GENERATION,
    KEPT,
    TEMPLATE_NAME,
    TOKENIZER,
    find_ends,
    find_model_files,
    find_named_tokenizer,
    find_tokenizer_files,
    read_table,
    write_ids,
)
from dtlayout.models.first_source import find_place
from dtlayout.models.peft import find_base_folder


def keep(config: Config, *, is_new: bool) -> None:
    """Write RUN/kept, on one process; `is_new` says that the run starts now, and from `train.init_from` if from any.

    CheckpointError if it cannot be written, InvalidConfig or DataError for a file that cannot be used.
    """
    kept = Path(config.train.run_folder, KEPT)
    partial = _name_beside(kept, "partial")
    try:
        _make_empty(partial)
        write_beside(partial, find_base(config, is_new=is_new), config.data)
        if _read_all(kept) == _read_all(partial):  # nothing to lose in a kill between two renames
            shutil.rmtree(partial)
        else:
            _replace(partial, kept)
    except OSError as error:
        raise CheckpointError(f"{kept} cannot be written: {type(error).__name__} {error}") from error


def _read_all(folder: Path) -> dict[Path, bytes]:
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def find_base(config: Config, *, is_new: bool) -> Path | None:
    """The folder with the files that a run's model came with: the run's copy, or `train.init_from`; None if neither."""
    kept = Path(config.train.run_folder, KEPT)
    if not is_new and kept.is_dir():
        return kept
    came_from = find_place(config.train.init_from)
    return find_base_folder(came_from) if config.train.init_from and came_from.is_dir() else None


def write_beside(folder: Path, base: Path | None, data: DataConfig | None) -> None:
    """Copy the files that belong to exported weights into an existing folder: configs, tokenizer, chat templates.

    `base` is the folder that they come from, None if there is none. `data` says how texts become ids; with None the
    base's files are copied byte for byte. If `data` names another tokenizer, its files replace those of the base. The
    chat template of `data`, if it has one, replaces that of the base.

    The ids that end texts are written too. They are those that the configs beside the tokenizer name, then the end of
    document if `data` names one, then the end of an answer if `data` has conversations. If the configs name no id, both
    ends of the tokenizer are taken. Without `base` and `data` a generation_config.json without ids is written.

    OSError if a file cannot be copied, DataError if the tokenizer of `data` cannot be used, InvalidConfig if a link
    leads out of its folder.
    """
    known = load_tokenizer(data.tokenizer, data.end_of_document) if data else None
    own = find_file(data.tokenizer) if data else None
    files = find_tokenizer_files(base) if base else {}
    is_same = data is None or (own is not None and _holds(files.get(TOKENIZER)) == _holds(own))
    files = (files if is_same else {}) | (find_named_tokenizer(own) if own else {})
    files |= find_model_files(base) if base else {}
    if data and data.chat_template:
        files[TEMPLATE_NAME] = expand(data.chat_template)
    for name, file in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, folder / name)
    if data and known:
        from_where = base if is_same else own.parent if own else None
        said = find_ends(from_where) if from_where else []
        ends = _find_ends(said, known, data)
        if not (base and is_same and said == ends):
            _write_ends(folder, known, ends, is_same=is_same)
    elif not files:
        write_json(folder / GENERATION, write_ids({}, None, []))


def _holds(file: Path | None) -> bytes | None:
    return file.read_bytes() if file else None


def _find_ends(said: list[int], tokenizer: Tokenizer, data: DataConfig) -> list[int]:
    """The ids with which texts end: those that the files say, and others with which the run's texts end."""
    ends = list(said)
    if data.end_of_document or not said:
        ends.append(tokenizer.end_of_document)
    if tokenizer.end_of_answer is not None and (data.has_conversations or not said):
        ends.append(tokenizer.end_of_answer)
    return list(dict.fromkeys(ends))


def _write_ends(folder: Path, tokenizer: Tokenizer, ends: list[int], *, is_same: bool) -> None:
    """Say with which ids texts begin and end, in generation_config.json and, where it is there, in config.json."""
    for name in (GENERATION, CONFIG):
        table = read_table(folder / name)
        if name == CONFIG and not table:
            continue
        begin = table.get("bos_token_id") if is_same and table else next(iter(tokenizer.begin), None)
        other = {"pad_token_id": None} if "pad_token_id" in table and not is_same else {}  # another tokenizer's id
        if (changed := write_ids(table | other, begin, ends)) != table:
            write_json(folder / name, changed)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a table as JSON; OSError if it cannot be written."""
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


@contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder`, to write into.

    After the block it replaces `folder`, and what was there is removed. If the block raises, the new folder is removed
    and `folder` stays.
    """
    partial = _name_beside(folder, "partial")
    _make_empty(partial)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _replace(partial, folder)


def _name_beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{kind}-{folder.name}")


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _replace(partial: Path, folder: Path) -> None:
    """Give a folder that is whole the name of one that may be there, which goes."""
    old = _name_beside(folder, "removed")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(partial, folder)
    shutil.rmtree(old, ignore_errors=True)
