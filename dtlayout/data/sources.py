"""Open a corpus as a stream of rows, always through Hugging Face `datasets`.

A source is one of
- local files: a path, a folder, a glob, or a list of these; .txt (one document a file), .json / .jsonl, .parquet;
- "python-stdlib": the .py files of the running Python's standard library, about 11 MB that every machine has;
- anything else is a name on the hub, `owner/name` or `owner/name:config`. The owner is needed: a bare "json" would make
  `datasets` read the files that lie in the working directory.

Local files have one split, "train"; a dataset on the hub has splits of its own.

All sources are streamed: `datasets` keeps no copy of local data, only an empty lock file in its cache folder, and local
sources never touch the network. Files are read in the order of their names, whatever the filesystem says.
"""

import glob
import json
import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from dtlayout.base.errors import DataError
from dtlayout.base.files import expand, parse_json
from dtlayout.base.formatting import first_line, plural
from dtlayout.base.source_names import (
    BUILDERS,
    LOCAL_SPLIT,
    STDLIB,
    SUFFIXES,
    describe_missing_split,
    is_hub_name,
    is_unread_data,
)

SourceRow = Mapping[str, Any]

_NOT_STDLIB = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """A source that is open, and can be read row by row."""

    source: str | Sequence[str]
    files: Sequence[Path]
    """Local files in the order in which they are read; empty for a dataset on the hub."""
    rows: Iterable[SourceRow]
    """One document each; for .txt files a row is the file, with the field "text"."""

    def read(self) -> Iterator[SourceRow]:
        """The rows in a fixed order; DataError with the place if they cannot be read."""
        iterator = iter(self.rows)
        for num_read in count():
            try:
                row = next(iterator, None)
            except Exception as error:  # pyarrow, fsspec and the hub's clients share no base class
                place = self._find_break(num_read)
                raise DataError(f"reading {self.source!r} broke {place}: {first_line(error)}") from error
            if row is None:
                return
            yield row

    def place(self, number: int) -> str:
        """Place of row `number`, which counts from 0: the file, and the row there, which counts from 1."""
        num_before = 0
        for file, rows in self._read_files():
            num_rows = sum(1 for _ in rows)
            if number < num_before + num_rows:
                return f"row {number - num_before + 1} of {str(file)!r}"
            num_before += num_rows
        return f"row {number + 1} of {self.source!r}"

    def _find_break(self, num_read: int) -> str:
        """Place where reading broke, as exactly as the kind of file allows."""
        builder = _builder(self.files)
        for file in self.files:
            if builder == "json" and (line := _find_bad_line(file)):
                return f"at line {line} of {str(file)!r}"
            if builder == "text" and not _is_utf8(file):
                return f"at {str(file)!r}"
        for file, rows in self._read_files():
            num_rows = 0
            try:
                for _ in rows:
                    num_rows += 1
            except Exception:
                return f"after {plural(num_rows, 'row')} of {str(file)!r}"
        return f"after {plural(num_read, 'row')}"

    def _read_files(self) -> Iterator[tuple[Path, Iterable[SourceRow]]]:
        """Each file with its rows, read again to name a place; empty where rows are not read file by file."""
        rows: Any = self.rows
        num_files = len(self.files)
        if num_files == getattr(rows, "num_shards", 0):
            for i, file in enumerate(self.files):
                yield file, rows.shard(num_files, i)


def open_corpus(source: str | Sequence[str], files: list[Path], split: str) -> Corpus:
    """The source, opened; DataError if it cannot be opened.

    `files` are its local files, from `list_files`. `split` is that of a hub dataset; `list_files` has checked it for
    local files. Line ends of .txt files become \\n.
    """
    return Corpus(source, files, _open_files(files) if files else _open_hub(str(source), split))


def list_files(source: str | Sequence[str], split: str = LOCAL_SPLIT) -> list[Path]:
    """Local files of `source` in reading order; empty if `source` is a name on the hub.

    DataError if there are none, or if local files have no such split.
    """
    if isinstance(source, str) and source != STDLIB and is_hub_name(source):
        return []
    if problem := describe_missing_split(source, split):
        raise DataError(problem)
    if source == STDLIB:
        return list(_list_stdlib(Path(sysconfig.get_path("stdlib"))))
    patterns = [source] if isinstance(source, str) else source
    files = list(dict.fromkeys(file for pattern in patterns for file in _match_files(pattern)))
    if not files:
        raise DataError(f"the source is an empty list; give paths of {SUFFIXES} files, '{STDLIB}' or a hub name")
    _check_one_kind(files, source)
    if not any(file.stat().st_size for file in files):
        raise DataError(f"{source!r} holds no byte in {plural(len(files), 'file')}; give files that hold documents")
    return files


def _match_files(pattern: str) -> list[Path]:
    path = expand(pattern)
    if path.is_file():
        return [path]
    if path.is_dir():
        found = _list_folder(path)
    else:
        found = [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]
    if not found:
        raise DataError(
            f"no file matches {pattern!r}; give a file, a folder or a glob of {SUFFIXES} files, "
            f"'{STDLIB}' or a hub name owner/name[:config]"
        )
    return sorted(found, key=Path.as_posix)


def _list_folder(folder: Path) -> list[Path]:
    """Files below a folder that can be read, linked folders included; DataError if some data would be left out."""
    found, unread, seen = list[Path](), list[Path](), set[str]()
    for place, subfolders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        subfolders[:] = [] if real in seen else [name for name in subfolders if not name.startswith(".")]
        files = [Path(place, name) for name in names if real not in seen and not name.startswith(".")]
        seen.add(real)  # a link may lead back
        found += [file for file in files if file.suffix in BUILDERS and file.is_file()]
        unread += [file for file in files if is_unread_data(file)]
    if unread:
        raise DataError(
            f"{str(folder)!r} holds {plural(len(unread), 'file')} that cannot be read, such as {str(min(unread))!r}, "
            f"beside {plural(len(found), 'file')} that can; unpack or convert them to one of {SUFFIXES}, or choose "
            f"files with a glob such as '**/*.jsonl'"
        )
    return found


def _check_one_kind(files: list[Path], source: str | Sequence[str]) -> None:
    suffixes = sorted({file.suffix for file in files})
    unknown = [suffix for suffix in suffixes if suffix not in BUILDERS]
    if unknown:
        example = next(file for file in files if file.suffix == unknown[0])
        raise DataError(f"cannot read {str(example)!r}: suffix {unknown[0]!r} is not one of {SUFFIXES}")
    if len({BUILDERS[suffix] for suffix in suffixes}) > 1:
        raise DataError(
            f"{source!r} mixes {' and '.join(suffixes)} files ({len(files)} in all); "
            f"choose one kind with a glob such as '**/*{suffixes[0]}'"
        )


@cache  # it reads 11 MB to leave out files that are not UTF-8, and the running Python does not change
def _list_stdlib(root: Path) -> list[Path]:
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _NOT_STDLIB)  # site-packages may be vast: don't even look
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return [file for file in sorted(files, key=Path.as_posix) if _is_utf8(file)]


def _is_utf8(file: Path) -> bool:
    try:
        file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _find_bad_line(file: Path) -> int:
    """First line, from 1 on, that is no JSON; 0 if there is none. The file is an array, or has an object a line."""
    with file.open("rb") as lines:
        texts = [lines.read()] if lines.peek(1)[:1] == b"[" else lines
        for number, text in enumerate(texts, start=1):
            try:
                parse_json(text.rstrip() or "0")  # an end of line is no part of the error
            except json.JSONDecodeError as error:
                return number - 1 + error.lineno
            except ValueError:  # not UTF-8
                return number
    return 0


def _builder(files: Sequence[Path]) -> str:
    """Name of the `datasets` builder that reads these files; .py comes from the standard library only."""
    return BUILDERS.get(files[0].suffix, "text") if files else ""


def _open_files(files: list[Path]) -> Iterable[SourceRow]:
    import datasets

    datasets.disable_progress_bars()  # progress of looking for files would be drawn between our lines
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # its readers raise the same errors
    builder = _builder(files)
    # data_files are patterns: unescaped, "a[1].txt" would match "a1.txt" or, silently, nothing
    patterns = [glob.escape(str(file.absolute())) for file in files]
    options = {"sample_by": "document"} if builder == "text" else {}
    more = f" and {plural(len(files) - 1, 'more file')}" if len(files) > 1 else ""
    with _refusal(f"cannot read {str(files[0])!r}{more} as {builder}: "):
        return datasets.load_dataset(builder, data_files={"train": patterns}, split="train", streaming=True, **options)


def _open_hub(source: str, split: str) -> Iterable[SourceRow]:
    import datasets

    name, _, config = source.partition(":")
    with _refusal(
        f"{source!r} is no local path, and opening split {split!r} of it on the Hugging Face hub failed (",
        f"); give {SUFFIXES} files, '{STDLIB}' or a reachable owner/name[:config]",
    ):
        return datasets.load_dataset(name, config or None, split=split, streaming=True)


@contextmanager
def _refusal(before: str, after: str = "") -> Iterator[None]:
    """Raise a DataError with the first line of any error inside the block."""
    try:
        yield
    except Exception as error:  # see `Corpus.read`
        raise DataError(f"{before}{first_line(error)}{after}") from error
