"""Open a corpus as a stream of documents, always through Hugging Face `datasets`.

A source is one of
- local files: a path, a folder, a glob, or a list of these; .txt (one document a file), .json / .jsonl, .parquet;
- "python-stdlib": the .py files of the running Python's standard library, about 11 MB that every machine has;
- anything else is a name on the hub, `owner/name` or `owner/name:config`. The owner is needed: a bare "json" would have
  `datasets` read whatever lies in the working directory.

All are streamed: `datasets` keeps no copy of local data, only an empty lock file in its cache folder, and nothing
local touches the network. The order is the order of the names, whatever the filesystem says.
"""

import glob
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from dtlayout.errors import DataError

STDLIB = "python-stdlib"

_BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_SUFFIXES = ", ".join(_BUILDERS)
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?")
_Rows = Iterable[Mapping[str, Any]]
_NOT_STDLIB = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__"}


def open_documents(source: str | Sequence[str], split: str, text_field: str) -> Iterator[str]:
    """The documents of `source`, in a fixed order and one at a time.

    `split` chooses a part of a hub dataset; local files are one part, whatever it says. `text_field` is the column
    that holds the text; it is "text" for .txt files and for the standard library. Line ends of .txt files become \\n.
    A source that cannot be opened is a DataError here, one that breaks later is a DataError while reading.
    """
    files = list_files(source)
    rows = _open_files(files) if files else _open_hub(str(source), split)
    return _read_texts(rows, source, text_field)


def list_files(source: str | Sequence[str]) -> list[Path]:
    """The local files of `source` in reading order; empty means that `source` is a name on the hub."""
    if source == STDLIB:
        return _list_stdlib()
    if isinstance(source, str) and _is_hub_name(source):
        return []
    patterns = [source] if isinstance(source, str) else source
    files = list(dict.fromkeys(file for pattern in patterns for file in _match_files(pattern)))
    if not files:
        raise DataError(f"the source is an empty list; give paths of {_SUFFIXES} files, '{STDLIB}' or a hub name")
    _check_one_kind(files, source)
    return files


def _is_hub_name(source: str) -> bool:
    path = Path(source).expanduser()
    return not path.exists() and path.suffix not in _BUILDERS and _HUB_NAME.fullmatch(source) is not None


def _match_files(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [file for file in path.rglob("*") if file.suffix in _BUILDERS and file.is_file()]
        found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    else:
        found = [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]
    if not found:
        raise DataError(
            f"no file matches {pattern!r}; give a file, a folder or a glob of {_SUFFIXES} files, "
            f"'{STDLIB}' or a hub name owner/name[:config]"
        )
    return sorted(found, key=Path.as_posix)


def _check_one_kind(files: list[Path], source: str | Sequence[str]) -> None:
    suffixes = sorted({file.suffix for file in files})
    unknown = [suffix for suffix in suffixes if suffix not in _BUILDERS]
    if unknown:
        example = next(file for file in files if file.suffix == unknown[0])
        raise DataError(f"cannot read {str(example)!r}: suffix {unknown[0]!r} is not one of {_SUFFIXES}")
    if len({_BUILDERS[suffix] for suffix in suffixes}) > 1:
        raise DataError(
            f"{source!r} mixes {' and '.join(suffixes)} files ({len(files)} in all); "
            f"choose one kind with a glob such as '**/*{suffixes[0]}'"
        )


def _list_stdlib() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
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


def _open_files(files: list[Path]) -> _Rows:
    import datasets

    builder = _BUILDERS.get(files[0].suffix, "text")  # .py comes from the standard library only
    # data_files are patterns: unescaped, "a[1].txt" would match "a1.txt" or, silently, nothing
    patterns = [glob.escape(str(file.absolute())) for file in files]
    options = {"sample_by": "document"} if builder == "text" else {}
    more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
    with _refusal(f"cannot read {str(files[0])!r}{more} as {builder}: "):
        return datasets.load_dataset(builder, data_files={"train": patterns}, split="train", streaming=True, **options)


def _open_hub(source: str, split: str) -> _Rows:
    import datasets

    name, _, config = source.partition(":")
    with _refusal(
        f"{source!r} is no local path, and opening split {split!r} of it on the Hugging Face hub failed (",
        f"); give {_SUFFIXES} files, '{STDLIB}' or a reachable owner/name[:config]",
    ):
        return datasets.load_dataset(name, config or None, split=split, streaming=True)


def _read_texts(rows: _Rows, source: str | Sequence[str], text_field: str) -> Iterator[str]:
    iterator = iter(rows)
    for num_read in count():
        with _refusal(f"reading {source!r} broke after {num_read} documents: "):
            row = next(iterator, None)
        if row is None:
            return
        if text_field not in row:
            raise DataError(f"{source!r} has no field {text_field!r}; it has {', '.join(sorted(row))}: set text_field")
        text = row[text_field]
        if not isinstance(text, str):
            raise DataError(
                f"document {num_read} of {source!r} holds {type(text).__name__} in field {text_field!r}, not text; "
                "set text_field or remove that document"
            )
        yield text


@contextmanager
def _refusal(before: str, after: str = "") -> Iterator[None]:
    """DataError with the first line of what goes wrong; pyarrow, fsspec and the hub's clients share no base class."""
    try:
        yield
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        raise DataError(f"{before}{type(error).__name__}: {line}{after}") from error
