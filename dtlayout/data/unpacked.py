"""Size of a local file's content once it is unpacked, without unpacking it: for shares of work that are about equal.

- gzip: the last four bytes of a file are the size of its last member, modulo 4 GiB (RFC 1952, sec. 2.3.1).
- zstd: the header of the first frame may hold the size of its content (RFC 8878, sec. 3.1.1.1).
- Where these say nothing, or less than the file has packed, text is taken as three times its packed size.
"""

import os
from collections.abc import Callable
from pathlib import Path

from dtlayout.base.source_names import find_kind

_USUAL_RATIO = 3
_GZIP_MODULUS = 1 << 32
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_HEADER_BYTES = 18  # the longest


def estimate_unpacked_bytes(file: Path) -> int:
    """Bytes of a file's content, at least 1; of one that is not packed its size."""
    size, packing = file.stat().st_size, find_kind(file)[1]
    if not packing:
        return max(1, size)
    try:
        said = _READERS[packing](file, size)
    except OSError:  # too short for its kind, which reading it will say
        said = 0
    return max(1, said if said >= size else _USUAL_RATIO * size)


def _read_gzip_size(file: Path, packed_bytes: int) -> int:
    """The size in the trailer, with as many times 4 GiB as bring it nearest to what text usually has."""
    with file.open("rb") as stream:
        stream.seek(-4, os.SEEK_END)
        size = int.from_bytes(stream.read(4), "little")
    return size + max(0, round((_USUAL_RATIO * packed_bytes - size) / _GZIP_MODULUS)) * _GZIP_MODULUS


def _read_zstd_size(file: Path, _: int) -> int:
    """The size of the first frame's content; 0 where its header does not hold it."""
    with file.open("rb") as stream:
        header = stream.read(_ZSTD_HEADER_BYTES)
    if header[:4] != _ZSTD_MAGIC or len(header) < 5:
        return 0
    is_single = bool(header[4] & 0x20)
    width = (int(is_single), 2, 4, 8)[header[4] >> 6]
    begin = 5 + (not is_single) + (0, 1, 2, 4)[header[4] & 3]  # behind the window's size and the dictionary's id
    return int.from_bytes(header[begin : begin + width], "little") + (256 if width == 2 else 0)


_READERS: dict[str, Callable[[Path, int], int]] = {"gzip": _read_gzip_size, "zstd": _read_zstd_size}
"""Packing → reader of the unpacked size."""
