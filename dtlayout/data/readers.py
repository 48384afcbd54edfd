"""Readers: the rows of one local file, one after the other, whatever its kind and however it is packed.

- text: the file is one row, with the field "text". Line ends become \\n.
- json: an object a line, or one array of objects.
- parquet and arrow: rows of a table; arrow is a stream or a file, as `datasets` and Feather write them.

Text and JSON may be packed by gzip or Zstandard. A row that is damaged by itself is a `BadRow`; what is wrong with a
whole file is a DataError.
"""

import io
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from dtlayout.base.errors import DataError
from dtlayout.base.files import parse_json
from dtlayout.base.formatting import first_line, plural
from dtlayout.base.source_names import find_kind

SourceRow = Mapping[str, Any]

_ROWS_AT_ONCE = 256
"""Rows of a table that become Python objects together."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class BadRow(NamedTuple):
    """A row that cannot be read, while the rows behind it can."""

    place: str
    """Place in the file, such as "line 3"; empty for the whole file."""
    why: str
    is_cut: bool = False
    """Whether the file ends inside of the row."""


@dataclass
class Position:
    """Place up to which a file was read."""

    tell: Callable[[], int] = lambda: 0
    """Bytes of the file that were read: packed ones where it is packed."""


def read_rows(
    file: Path, fields: Collection[str] = (), position: Position | None = None
) -> Iterator[SourceRow | BadRow]:
    """The rows of a file in their order; DataError where the file breaks off or is of another kind than its name says.

    If a table has one of `fields`, only those of its columns are read. `position` is set to that of each row.
    """
    position = position or Position()
    kind, packing = find_kind(file)
    reader = _READERS[kind or "text"]  # the standard library's own files
    num_rows = 0
    try:
        for row in reader(file, packing, fields, position):
            yield row
            num_rows += 1
        size = file.stat().st_size
        position.tell = lambda: size
    except DataError:
        raise
    except Exception as error:  # pyarrow, gzip and the filesystem share no base class
        if not num_rows and not packing and kind in ("parquet", "arrow") and not _opens(file):
            raise DataError(f"cannot read {str(file)!r} as {kind}: {first_line(error)}") from error
        raise DataError(f"broke after {plural(num_rows, 'row')} of {str(file)!r}: {first_line(error)}") from error


def _opens(file: Path) -> bool:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file):
            return True
    except Exception:
        return False


@contextmanager
def _open(file: Path, packing: str, position: Position) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked."""
    if packing == "gzip":
        import gzip

        with file.open("rb") as packed, gzip.open(packed) as unpacked:
            position.tell = packed.tell
            yield cast(BinaryIO, unpacked)
    elif packing == "zstd":
        import pyarrow

        with pyarrow.OSFile(str(file)) as packed, pyarrow.CompressedInputStream(packed, "zstd") as stream:
            position.tell = packed.tell
            yield cast(BinaryIO, io.BufferedReader(stream))
    else:
        with file.open("rb") as plain:
            position.tell = plain.tell
            yield plain


def _read_text(file: Path, packing: str, _: Collection[str], position: Position) -> Iterator[SourceRow | BadRow]:
    with _open(file, packing, position) as content:
        try:
            text = content.read().decode("utf-8")
        except UnicodeDecodeError as error:
            yield BadRow("", f"UnicodeDecodeError: {error}")
            return
        yield {"text": text.replace("\r\n", "\n").replace("\r", "\n")}


def _read_json(file: Path, packing: str, _: Collection[str], position: Position) -> Iterator[SourceRow | BadRow]:
    with _open(file, packing, position) as content:
        first = b""
        for number, line in enumerate(content, start=1):
            text = line.strip().removeprefix(b"\xef\xbb\xbf")
            if not text:
                continue
            if not first and text[:1] == b"[":
                yield from _read_array(file, b"\n" * (number - 1) + line + content.read())
                return
            first = text
            try:
                yield _expect_object(parse_json(text))
            except ValueError as error:
                yield BadRow(f"line {number}", first_line(error), is_cut=not line.endswith(b"\n"))


def _read_array(file: Path, content: bytes) -> Iterator[SourceRow | BadRow]:
    """Rows of one array, which is read whole."""
    try:
        rows = parse_json(content)
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise DataError(
            f"broke at line {line} of {str(file)!r}: {type(error).__name__}: {first_line(error)}"
        ) from error
    for number, row in enumerate(rows, start=1):
        try:
            yield _expect_object(row)
        except ValueError as error:
            yield BadRow(f"element {number}", first_line(error))


def _expect_object(row: Any) -> SourceRow:
    if not isinstance(row, dict):
        raise ValueError(f"it is no object, but {type(row).__name__}")
    return row


def _read_parquet(file: Path, _: str, fields: Collection[str], position: Position) -> Iterator[SourceRow | BadRow]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        columns, num_all = _choose(table.schema_arrow.names, fields), max(1, table.metadata.num_rows)
        num_rows, size = 0, file.stat().st_size
        position.tell = lambda: size * num_rows // num_all  # row groups are read by columns
        for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns):
            num_rows += batch.num_rows
            yield from batch.to_pylist()


def _read_arrow(file: Path, _: str, fields: Collection[str], position: Position) -> Iterator[SourceRow | BadRow]:
    import pyarrow

    with pyarrow.memory_map(str(file)) as mapped:
        try:
            batches: Any = pyarrow.ipc.open_stream(mapped)
            position.tell = mapped.tell
        except pyarrow.ArrowInvalid:
            whole = pyarrow.ipc.open_file(mapped)
            batches = _read_batches(whole, file.stat().st_size, position)
        for batch in batches:
            columns = _choose(batch.schema.names, fields)
            chosen = batch.select(columns) if columns else batch
            for start in range(0, chosen.num_rows, _ROWS_AT_ONCE):
                yield from chosen.slice(start, _ROWS_AT_ONCE).to_pylist()


def _read_batches(whole: Any, size: int, position: Position) -> Iterator[Any]:
    """Batches of an Arrow file of this size, of which each is taken for an equal share of the bytes."""
    number = 0
    position.tell = lambda: size * number // whole.num_record_batches
    for i in range(whole.num_record_batches):
        number = i + 1
        yield whole.get_batch(i)


def _choose(names: Collection[str], fields: Collection[str]) -> list[str] | None:
    """Columns to read; None for all, so that an error can name those that there are."""
    found = [name for name in names if name in fields]
    return found or None


_READERS: dict[str, Callable[[Path, str, Collection[str], Position], Iterator[SourceRow | BadRow]]] = {
    "text": _read_text,
    "json": _read_json,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}
"""Kind of file → reader."""
