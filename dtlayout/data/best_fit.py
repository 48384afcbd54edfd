"""Best-fit packing: whole documents fill samples, the longest first, each where it leaves the least room.

H. Ding et al., "Fewer Truncations Improve Language Modeling", arXiv:2404.10830, with windows: `WINDOW` passages, in the
order of the corpus, are packed by themselves. So memory does not grow with the corpus, and the packing is a function of
the lengths of documents and of S alone. A document longer than S + 1 tokens is cut into passages that overlap by one
token, so that each of its tokens but the first is a target once; or, where its rest is not kept, after S + 1 tokens.

    folder/best-fit-<S>.bin     num_samples, num_passages, num_tokens, num_cut; then the offset of each passage in the
                                file of tokens; then for each sample the index of its first passage, and their number

All numbers are little-endian int64. Like tokens, the file is written under another name and renamed when it is whole.
"""

import os
import shutil
import tempfile
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import numpy as np
import numpy.typing as npt

WINDOW = 1 << 16
"""Passages that are packed together; `Samples.fingerprint` must change when this does."""

Ints = npt.NDArray[np.int64]

_HEAD = 4
"""Numbers at the begin of the file."""


@dataclass(frozen=True, eq=False)
class Packing:
    """The samples of a source, mapped from disk."""

    firsts: Ints
    """Offset of each passage in the file of tokens; those of a sample follow each other, in ascending order."""
    offsets: Ints
    """Index in `firsts` of the first passage of each sample, and the number of passages."""
    num_tokens: int
    """Tokens of all passages."""
    num_cut: int
    """Documents that are longer than a sample."""

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.offsets.size - 1


def open_packing(folder: Path, documents: Ints, seq_len: int, *, keeps_rest: bool) -> Packing:
    """The packing of the documents of a folder of tokens, which is made if it is not there.

    `documents` are the offsets of the documents, and the end of the last one. Where `folder` cannot be written, the
    packing goes to a temporary file of this process.
    """
    path = folder / f"best-fit-{seq_len}.bin"
    with suppress(OSError, ValueError):
        return _map(path)
    own = path.with_name(f"{path.name}.{uuid4().hex[:8]}.partial")
    try:
        with own.open("w+b") as file:
            _write(file, documents, seq_len, keeps_rest=keeps_rest)
        own.replace(path)
        return _map(path)
    except OSError:
        with tempfile.NamedTemporaryFile() as file:  # it lives as long as it is mapped
            _write(file, documents, seq_len, keeps_rest=keeps_rest)
            return _map(Path(file.name))
    finally:
        with suppress(OSError):
            own.unlink(missing_ok=True)


def fit(lengths: Ints, room: int) -> list[int]:
    """Index of the sample of each passage: the longest is placed first, into the fullest sample that has room for it.

    `lengths` are at most `room`. Of equally long passages the first is placed first.

    >>> fit(np.array([6, 5, 4, 3]), 10)
    [0, 1, 0, 1]
    """
    rooms: list[int] = []  # that samples have left, each number once, in ascending order
    samples_by_room: dict[int, list[int]] = {}
    found = [0] * len(lengths)
    num_samples = 0
    for passage in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[passage])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            sample, left = num_samples, room - length
            num_samples += 1
        else:
            left = rooms[place] - length
            alike = samples_by_room[rooms[place]]
            sample = alike.pop()
            if not alike:
                del samples_by_room[rooms.pop(place)]
        found[passage] = sample
        if left:
            if left not in samples_by_room:
                insort(rooms, left)
            samples_by_room.setdefault(left, []).append(sample)
    return found


def _cut(documents: Ints, seq_len: int, *, keeps_rest: bool) -> Iterator[tuple[Ints, Ints, int]]:
    """Windows of passages: offsets and lengths of at most `WINDOW` passages, and how many of them begin a document that
    is cut.
    """
    for start in range(0, documents.size - 1, WINDOW):
        offsets = np.asarray(documents[start : start + WINDOW + 1])
        lengths = np.diff(offsets)
        counts = np.maximum(-(-(lengths - 1) // seq_len), 1) if keeps_rest else np.ones_like(lengths)
        ends = counts.cumsum()
        for begin in range(0, int(ends[-1]), WINDOW):
            numbers = np.arange(begin, min(begin + WINDOW, int(ends[-1])))
            document = np.searchsorted(ends, numbers, side="right")
            before = (numbers - (ends - counts)[document]) * seq_len
            is_cut = (before == 0) & (lengths[document] > seq_len + 1)
            yield (
                offsets[document] + before,
                np.minimum(lengths[document] - before, seq_len + 1),
                int(is_cut.sum()),
            )


def _write(file: BinaryIO | Any, documents: Ints, seq_len: int, *, keeps_rest: bool) -> None:
    num_samples = num_passages = num_tokens = num_cut = 0
    file.write(bytes(8 * _HEAD))
    with tempfile.TemporaryFile() as offsets:
        for first_N, length_N, cut in _cut(documents, seq_len, keeps_rest=keeps_rest):
            sample_N = np.array(fit(length_N, seq_len + 1))
            order_N = np.lexsort((first_N, sample_N))
            begins = np.searchsorted(sample_N[order_N], np.arange(sample_N.max() + 1))
            file.write(first_N[order_N].astype("<i8").tobytes())
            offsets.write((num_passages + begins).astype("<i8").tobytes())
            num_samples, num_passages = num_samples + begins.size, num_passages + first_N.size
            num_tokens, num_cut = num_tokens + int(length_N.sum()), num_cut + cut
        offsets.write(np.array([num_passages], "<i8").tobytes())
        offsets.seek(0)
        shutil.copyfileobj(offsets, file)
    file.seek(0)
    file.write(np.array([num_samples, num_passages, num_tokens, num_cut], "<i8").tobytes())
    file.flush()
    os.fsync(file.fileno())  # the rename must not reach the disk before the bytes


def _map(path: Path) -> Packing:
    """Map a file; OSError if it is not there, ValueError if it has another size than it says."""
    numbers = np.memmap(path, dtype="<i8", mode="r")
    num_samples, num_passages, num_tokens, num_cut = numbers[:_HEAD].tolist()
    if numbers.size != _HEAD + num_passages + num_samples + 1:
        raise ValueError(f"{path} is not whole")
    middle = _HEAD + num_passages
    return Packing(numbers[_HEAD:middle], numbers[middle:], num_tokens, num_cut)
