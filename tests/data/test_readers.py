"""Readers: the same rows out of every kind of file, however it is packed and whatever columns stand beside."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dtlayout.base.errors import DataError
from dtlayout.data.readers import BadRow, read_rows

ROWS = [{"text": "é\n1", "n": 1}, {"text": "b", "n": 2}, {"text": "", "n": 3}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def pack(content: bytes) -> bytes:
    """Two frames, as tools that add to a file leave them."""
    frames = b""
    for part in (content[:30], content[30:]):
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(part)
        frames += sink.getvalue().to_pybytes()
    return frames


def write_arrow(path, *, is_stream):
    table = pa.Table.from_pylist(ROWS)
    new = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", lambda path: path.write_bytes(LINES)),
        ("a.json", lambda path: path.write_bytes(b"\xef\xbb\xbf\r\n" + LINES.replace(b"\n", b"\r\n"))),
        ("a.json", lambda path: path.write_text(json.dumps(ROWS, indent=2))),
        ("a.jsonl.gz", lambda path: path.write_bytes(gzip.compress(LINES[:40]) + gzip.compress(LINES[40:]))),
        ("a.jsonl.zst", lambda path: path.write_bytes(pack(LINES))),
        ("a.json.zst", lambda path: path.write_bytes(pack(json.dumps(ROWS).encode()))),
        ("a.parquet", lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)),
        ("a.arrow", lambda path: write_arrow(path, is_stream=True)),
        ("a.arrow", lambda path: write_arrow(path, is_stream=False)),
    ],
)
def test_rows_are_the_same_whatever_holds_them(tmp_path, name, write):
    write(tmp_path / name)
    assert list(read_rows(tmp_path / name)) == ROWS
    assert [row["text"] for row in read_rows(tmp_path / name, {"text", "tools"})] == [row["text"] for row in ROWS]


@pytest.mark.parametrize(("name", "change"), [("a.txt", bytes), ("a.txt.gz", gzip.compress), ("a.txt.zst", pack)])
def test_a_text_is_one_row_with_plain_ends_of_lines(tmp_path, name, change):
    (tmp_path / name).write_bytes(change("é\r\nb\rc\n".encode() + b"x" * 40))
    assert list(read_rows(tmp_path / name)) == [{"text": "é\nb\nc\n" + "x" * 40}]


def test_columns_beside_may_differ_from_row_to_row_and_from_file_to_file(tmp_path):
    rows = [{"text": "a", "n": 1}, {"text": "b", "n": "two", "m": {"k": [1]}}, {"text": "c", "at": "2020-01-01"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(read_rows(tmp_path / "a.jsonl")) == rows


def test_a_line_that_is_damaged_is_one_bad_row(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": 1}\n\n{"text": \n[1]\n3\n{"text": "\xff"}\n{"text": 2}\n')
    found = list(read_rows(tmp_path / "a.jsonl"))
    assert [row for row in found if not isinstance(row, BadRow)] == [{"text": 1}, {"text": 2}]
    bad = [row for row in found if isinstance(row, BadRow)]
    assert [row.place for row in bad] == ["line 3", "line 4", "line 5", "line 6"]
    assert bad[1].why == "ValueError: it is no object, but list"
    (tmp_path / "b.json").write_text('[{"text": 1}, 2]')
    assert list(read_rows(tmp_path / "b.json"))[1] == BadRow("element 2", "ValueError: it is no object, but int")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.parquet", b"no parquet", r"cannot read '.*a\.parquet' as parquet: Arrow"),
        ("a.arrow", b"no arrow at all", r"cannot read '.*a\.arrow' as arrow: Arrow"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-12], r"broke after \d rows? of '.*a\.jsonl\.gz': EOFError"),
        ("a.jsonl.gz", b"no gzip", r"broke after 0 rows of '.*a\.jsonl\.gz': BadGzipFile"),
        ("a.jsonl.zst", b"no zstd at all", r"broke after 0 rows of '.*a\.jsonl\.zst': "),
    ],
)
def test_a_file_that_is_torn_or_of_another_kind_is_named(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        list(read_rows(tmp_path / name))
