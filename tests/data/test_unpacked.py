"""Unpacked sizes: what the file itself says, or three times the packed size."""

import gzip
import os
import random
import string
from pathlib import Path

import pyarrow
import pytest

from dtlayout.config.sections import DataConfig
from dtlayout.data.prepare import prepare_shard
from dtlayout.data.tokenizing import Units, cut_into_chunks
from dtlayout.data.unpacked import estimate_unpacked_bytes


def make_text(num_bytes: int) -> bytes:
    """Letters that pack to some three quarters."""
    return "".join(random.Random(num_bytes).choices(string.ascii_letters, k=num_bytes)).encode()


def pack(text: bytes, packing: str) -> bytes:
    if packing == ".gz":
        return gzip.compress(text)
    return bytes(pyarrow.Codec("zstd").compress(text, asbytes=True)) if packing == ".zst" else text


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize("num_bytes", [40, 200, 300, 70_000])  # sizes of each width in a frame's header
def test_a_file_s_own_word_is_taken(tmp_path, packing, num_bytes):
    file = tmp_path / f"a.jsonl{packing}"
    file.write_bytes(pack(b"a" * num_bytes, packing))
    assert estimate_unpacked_bytes(file) == num_bytes


def test_where_a_file_says_nothing_or_less_than_it_has_it_is_three_times_its_size(tmp_path):
    text = make_text(10_000)
    with pyarrow.CompressedOutputStream(str(tmp_path / "stream.jsonl.zst"), "zstd") as stream:
        stream.write(text)
    (tmp_path / "members.jsonl.gz").write_bytes(gzip.compress(text) + gzip.compress(b"end"))
    (tmp_path / "short.jsonl.gz").write_bytes(b"\x1f\x8b")
    (tmp_path / "short.jsonl.zst").write_bytes(b"\x28\xb5")
    (tmp_path / "empty.jsonl.gz").write_bytes(b"")
    (tmp_path / "other.txt.zst").write_bytes(make_text(100))
    for file in tmp_path.iterdir():
        assert estimate_unpacked_bytes(file) == max(1, 3 * file.stat().st_size), file.name
    (tmp_path / "empty.jsonl").touch()
    assert estimate_unpacked_bytes(tmp_path / "empty.jsonl") == 1


@pytest.mark.parametrize(("num_packed", "num_bytes"), [(2 << 30, 5 << 30), (3 << 30, 9 << 30), (1 << 30, 3 << 30)])
def test_a_trailer_of_gzip_counts_modulo_four_gib(tmp_path, num_packed, num_bytes):
    file = tmp_path / "large.jsonl.gz"
    with file.open("wb") as stream:  # a hole: nothing of it is on disk but its end
        stream.seek(num_packed - 4)
        stream.write((num_bytes % (1 << 32)).to_bytes(4, "little"))
    assert estimate_unpacked_bytes(file) == num_bytes


def test_shards_and_chunks_of_packed_and_plain_files_have_about_as_many_rows(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(16):
        packing = ("", ".gz", ".zst", ".gz")[i // 4]  # the plain ones come first
        (folder / f"{i:02}.jsonl{packing}").write_bytes(pack(b'{"text": "one row of many"}\n' * 500, packing))
    data = DataConfig(source=f"{folder}/*", folder=str(tmp_path / "tokens"))
    assert [prepare_shard(data, shard, 4).num_files for shard in range(4)] == [4] * 4
    files = sorted(Path(folder).iterdir())
    assert os.path.getsize(files[0]) > 20 * os.path.getsize(files[-1])
    units = Units(files, [file.name for file in files], [0] * len(files))
    assert list(cut_into_chunks(units, 4)) == [(0, 4), (4, 8), (8, 12), (12, 16)]
