"""Open a corpus as a stream of rows.

A source is one of
- local files: a path, a folder, a glob, or a list of these, of the kinds that `dtlayout.data.readers` has;
- a folder with splits, such as a clone of a dataset of the hub (`dtlayout.base.dataset_folders`);
- "python-stdlib": the .py files of the running Python's standard library, about 11 MB that every machine has;
- anything else is a name on the hub, `owner/name` or `owner/name:config`, which `datasets` streams. The owner is
  needed: a bare "json" would make `datasets` read the files that lie in the working directory.

A corpus is read in units, the files in the order of their names, so that what a file's rows became can be kept when
another file changes. A dataset of the hub is one unit. No copy of the data is kept, and local sources never touch the
network.
"""

import glob
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from dtlayout.base.dataset_folders import find_splits, list_folder
from dtlayout.base.errors import DataError
from dtlayout.base.files import expand
from dtlayout.base.formatting import first_line, plural
from dtlayout.base.source_names import (
    KINDS,
    LOCAL_SPLIT,
    STDLIB,
    SUFFIXES,
    describe_missing_split,
    find_kind,
    is_hub_name,
    split_config,
)
from dtlayout.data.readers import LFS_POINTER, BadRow, Position, SourceRow, read_rows

_NOT_STDLIB = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}


class BrokenFile(DataError):
    """Raised where a file cannot be read any further; other files of the source may be whole."""


@dataclass(frozen=True)
class Corpus:
    """A source that is open, and can be read row by row."""

    source: str | Sequence[str]
    files: Sequence[Path]
    """Local files in the order in which they are read; empty for a dataset on the hub."""
    rows: Iterable[SourceRow] = ()
    """Rows of a dataset on the hub."""
    fields: Collection[str] = ()
    """Fields that somebody reads; other columns of tables may be left out."""
    num_rows: int = 0
    """Rows of a dataset on the hub; 0 where it does not say."""
    folder: Path = Path()
    """Folder below which places name files, so that a place stays true where the files are moved."""
    position: Position = field(default_factory=Position)
    """Place up to which the file at hand is read."""

    @property
    def num_units(self) -> int:
        """Files, or 1 for a dataset of the hub."""
        return len(self.files) or 1

    def read(self, unit: int, first: int = 0) -> Iterator[SourceRow | BadRow]:
        """The rows of a unit in a fixed order, from number `first` on.

        If reading breaks, BrokenFile with the place for a file, and DataError for a dataset of the hub.
        """
        try:
            rows: Iterable[Any] = self._read_hub()
            if self.files:
                rows = read_rows(self.files[unit], self.fields, self.position)
            yield from islice(rows, first, None)
        except DataError as error:
            said = str(error)
            kind = BrokenFile if self.files else DataError
            raise kind(f"reading {self.source!r} {said}" if said.startswith("broke ") else said) from error

    def _read_hub(self) -> Iterator[SourceRow]:
        num_rows = 0
        try:
            for row in self.rows:
                yield row
                num_rows += 1
        except Exception as error:  # fsspec and the hub's clients share no base class
            raise DataError(f"broke after {plural(num_rows, 'row')}: {first_line(error)}") from error

    def describe_bad(self, unit: int, row: BadRow) -> str:
        """Reason why a row cannot be read, behind its place in the source."""
        place = f"{row.place} of " if row.place else ""
        return f"{place}{self._name(unit)!r}: {row.why}"

    def place(self, unit: int, number: int) -> str:
        """Place of row `number` of a unit, which counts from 0: the file, and the row there, which counts from 1."""
        row = f"row {number + 1}"
        return f"{row} of {self._name(unit)!r}" if self.files else row

    def _name(self, unit: int) -> str:
        return os.path.relpath(self.files[unit].absolute(), self.folder)


def find_shared_folder(files: Sequence[Path]) -> Path:
    """The folder that holds all these files, itself or in its folders."""
    return Path(os.path.commonpath([file.absolute().parent for file in files]))


def open_corpus(
    source: str | Sequence[str], files: list[Path], split: str, fields: Collection[str] = (), folder: Path = Path()
) -> Corpus:
    """The source, opened; DataError if it cannot be opened.

    `files` are its local files, from `list_files`, which has chosen by the split, and `folder` is the one below which
    places name them. `split` is that of a hub dataset. `fields` are those that are read of rows.
    """
    if files:
        return Corpus(source, files, fields=fields, folder=folder)
    rows = _open_hub(str(source), split)
    return Corpus(source, files, rows, fields, _count_hub_rows(rows, split))


def list_files(source: str | Sequence[str], split: str = LOCAL_SPLIT) -> list[Path]:
    """Local files of `source` in reading order; empty if `source` is a name on the hub.

    DataError if there are none, or if local files have no such split.
    """
    if isinstance(source, str) and source != STDLIB and is_hub_name(source):
        return []
    path, config = split_config(source) if isinstance(source, str) and source != STDLIB else (Path(), "")
    splits = find_splits(path, config) if path.name and path.is_dir() else {LOCAL_SPLIT: []}
    if problem := describe_missing_split(source, split, splits):
        raise DataError(problem)
    if source == STDLIB:
        return list(_list_stdlib(Path(sysconfig.get_path("stdlib"))))
    patterns = [source] if isinstance(source, str) else source
    files = splits[split] or list(dict.fromkeys(file for pattern in patterns for file in _match_files(pattern)))
    if not files:
        raise DataError(f"the source is an empty list; give paths of {SUFFIXES} files, '{STDLIB}' or a hub name")
    _check_one_kind(files, source)
    _check_whole(files, source)
    return files


def _match_files(pattern: str) -> list[Path]:
    path = expand(pattern)
    if path.is_file():
        return [path]
    if path.is_dir():
        found = list_folder(path)
    else:
        found = [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]
    if not found:
        raise DataError(
            f"no file matches {pattern!r}; give a file, a folder or a glob of {SUFFIXES} files, "
            f"'{STDLIB}' or a hub name owner/name[:config]"
        )
    return sorted(found, key=Path.as_posix)


def _check_one_kind(files: list[Path], source: str | Sequence[str]) -> None:
    kinds = {file: find_kind(file)[0] for file in files}
    unknown = [file for file, kind in kinds.items() if not kind]
    if unknown:
        suffix = "".join(unknown[0].suffixes[-2:]) if unknown[0].suffix in (".gz", ".zst") else unknown[0].suffix
        raise DataError(f"cannot read {str(unknown[0])!r}: suffix {suffix!r} is not one of {SUFFIXES}")
    if len(set(kinds.values())) > 1:
        suffixes = sorted({next(each for each in reversed(file.suffixes) if each in KINDS) for file in files})
        raise DataError(
            f"{source!r} mixes {' and '.join(suffixes)} files ({len(files)} in all); "
            f"choose one kind with a glob such as '**/*{suffixes[0]}', or name each kind as a source of its own in "
            f"[[data.mixture]]"
        )


def _check_whole(files: list[Path], source: str | Sequence[str]) -> None:
    """Raise DataError for files without a byte, and for the pointers that Git LFS leaves in the place of files."""
    sizes = {file: file.stat().st_size if file.exists() else -1 for file in files}
    if missing := [file for file, size in sizes.items() if size < 0]:
        raise DataError(f"{source!r} names {str(missing[0])!r}, which is not there")
    if not any(sizes.values()):
        raise DataError(f"{source!r} holds no byte in {plural(len(files), 'file')}; give files that hold documents")
    small = [file for file, size in sizes.items() if 0 < size < 1024]
    pointers = [file for file in small if file.read_bytes().startswith(LFS_POINTER)]
    if pointers:
        raise DataError(
            f"{plural(len(pointers), 'file')} of {source!r} are pointers of Git LFS, such as {str(pointers[0])!r}; "
            f"fetch what they stand for with git lfs pull"
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


def _open_hub(source: str, split: str) -> Iterable[SourceRow]:
    import datasets

    name, _, config = source.partition(":")
    with _refusal(
        f"{source!r} is no local path, and opening split {split!r} of it on the Hugging Face hub failed (",
        f"); give {SUFFIXES} files, '{STDLIB}' or a reachable owner/name[:config]",
    ):
        return datasets.load_dataset(name, config or None, split=split, streaming=True)


def _count_hub_rows(rows: Any, split: str) -> int:
    """Rows of a dataset on the hub as its description says them; 0 where it does not, and for a slice of a split."""
    splits = getattr(getattr(rows, "info", None), "splits", None) or {}
    return int(getattr(splits[split], "num_examples", 0) or 0) if split in splits else 0


@contextmanager
def _refusal(before: str, after: str = "") -> Iterator[None]:
    """Raise a DataError with the first line of any error inside the block."""
    try:
        yield
    except Exception as error:  # see `Corpus._read_hub`
        raise DataError(f"{before}{first_line(error)}{after}") from error
