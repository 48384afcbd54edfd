"""Tokenize the units of a corpus that no part holds yet: in this process, or in several that share its files.

[Note: chunks]
Files that follow each other make a chunk, some 64 MB of them, or one file that is larger. Each process takes the next
chunk when it is done with one, and writes parts of its own. Parts say which rows of which file they cover, so joining
gives the tokens of one process to the byte, whoever has tokenized what.
"""

import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from dtlayout.base.errors import DataError
from dtlayout.base.formatting import plural
from dtlayout.base.interpreter import elsewhere
from dtlayout.base.parent import end_with_parent
from dtlayout.config.sections import DataConfig
from dtlayout.data.documents import read_documents
from dtlayout.data.pieces import PieceWriter, find_pieces
from dtlayout.data.sources import open_corpus
from dtlayout.data.tokenizer import Tokenizer, load_tokenizer

_PART_TOKENS = 1 << 24  # tokenized in ten seconds or so, the work that a kill can cost
_CHUNK_BYTES = 1 << 26
_SECONDS_BETWEEN_LINES = 10.0
_DOCUMENTS_AT_ONCE = 256  # that a process counts before it tells the others


@dataclass(frozen=True)
class Tokenized:
    """Work that was done, beside what was there before."""

    num_documents: int
    num_tokens: int
    seconds: float


@dataclass(frozen=True)
class Units:
    """Units of a corpus that follow each other, and how far each is tokenized."""

    files: Sequence[Path]
    """Local files; empty for a dataset of the hub, which is one unit."""
    names: Sequence[str]
    """Fingerprint of each unit."""
    firsts: Sequence[int | None] = ()
    """First row of each unit that no part holds; None for a unit that is not read."""
    known: Sequence[int] = ()
    """Tokens of each unit that parts hold."""

    def take(self, begin: int, end: int) -> "Units":
        """Some of the units."""
        return Units(
            self.files[begin:end], self.names[begin:end], self.firsts[begin:end], self.known[begin:end]
        )  # fmt: skip


def dtype_of(tokenizer: Tokenizer) -> "np.dtype[Any]":
    """Number format of ids in files."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def write_parts(
    data: DataConfig, tokenizer: Tokenizer, units: Units, folder: Path, chosen: range, processes: int = 1
) -> Tokenized:
    """Write the parts of the `chosen` units that are not there yet; as much as `max_tokens` needs.

    DataError for more bad rows than `max_bad_rows`, and where a file cannot be read.
    """
    chains = find_pieces(folder.parent, units.names)
    found = [[placed.piece for placed in chain] for chain in chains]
    known = [sum(piece.num_tokens for piece in chain) for chain in found]
    firsts = [
        None if (chain and chain[-1].is_end) or i not in chosen else chain[-1].end_row if chain else 0
        for i, chain in enumerate(found)
    ]
    units = Units(units.files, units.names, firsts, known)
    first_missing = next((i for i, first in enumerate(firsts) if first is not None), None)
    limit = data.max_tokens or float("inf")
    if first_missing is None or sum(known[: first_missing + 1]) >= limit:
        return Tokenized(0, 0, 0.0)
    pieces = [piece for i in chosen for piece in found[i]]
    num_left = sum(first is not None for first in firsts)
    progress = TokenizingProgress(
        data, sum(piece.num_documents for piece in pieces), sum(piece.num_tokens for piece in pieces)
    )
    progress.say_begin(num_left, len(chosen))
    bad = _BadRows(data, sum(piece.num_bad for chain in found for piece in chain))
    if processes > 1 and num_left > 1:
        _tokenize_in_processes(data, units, folder, progress, processes)
    else:
        _tokenize(data, tokenizer, units, folder, bad, progress.count)
    return progress.end()


def _tokenize(
    data: DataConfig,
    tokenizer: Tokenizer,
    units: Units,
    folder: Path,
    bad: "_BadRows",
    count: Callable[[int], None],
) -> None:
    """Write parts of units; `count` is called with the number of ids of each document."""
    limit, known = data.max_tokens or float("inf"), np.cumsum(units.known)
    fields = {data.messages_field or data.text_field, *(["tools"] if data.messages_field else [])}
    corpus, firsts = open_corpus(data.source, [*units.files], data.split, fields), [*units.firsts]
    writer, unit, num_read = PieceWriter(folder, dtype_of(tokenizer), _PART_TOKENS), -1, 0
    try:
        with closing(read_documents(corpus, data, tokenizer, firsts, bad.note)) as documents:
            for read in documents:
                if read.unit != unit:
                    unit = read.unit
                    writer.begin(units.names[unit], firsts[unit] or 0)
                if read.document is None:
                    writer.end(read.row)
                    writer.close_piece(bad.by_unit[unit])
                    unit = -1
                    continue
                writer.add(read.document, read.row)
                count(read.document.ids.size)
                num_read += read.document.ids.size
                if known[unit] + num_read >= limit:
                    break
                if writer.is_full:
                    writer.close_piece(bad.by_unit[unit])
                    writer.flush()
                    firsts[unit], unit = read.row + 1, -1
    finally:
        writer.close_piece(bad.by_unit[unit])
        writer.flush()


def _tokenize_in_processes(
    data: DataConfig, units: Units, folder: Path, progress: "TokenizingProgress", processes: int
) -> None:
    """Write parts of units in several processes: [Note: chunks]."""
    chunks, here = [units.take(begin, end) for begin, end in cut_into_chunks(units)], os.getcwd()
    processes = min(processes, len(chunks))
    spawning = get_context("spawn")  # a fork would copy the tokenizer's threads, which do not run in the copy
    shared = spawning.Array("q", 3)
    threads = max(1, count_cores() // processes)
    pool = ProcessPoolExecutor(processes, spawning, _begin_process, (shared, threads, os.getpid(), here))
    try:
        with elsewhere():
            asked = [pool.submit(_tokenize_chunk, data, chunk, folder) for chunk in chunks]
        left: set[Future[None]] = set(asked)
        while left:
            done, left = wait(left, _SECONDS_BETWEEN_LINES, FIRST_COMPLETED)
            progress.follow(*shared[:2])
            for each in done:
                each.result()
    except BrokenProcessPool:
        raise DataError(
            f"a process that tokenized {data.source!r} was ended from outside, perhaps because memory was full; parts "
            f"that are whole are kept, and the same command goes on after them; use fewer --processes than {processes}"
        ) from None
    finally:
        shared[_STOP] = 1
        pool.shutdown(cancel_futures=True)
        progress.follow(*shared[:2])


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cut_into_chunks(units: Units) -> Iterator[tuple[int, int]]:
    """First unit of each chunk, and the one behind its last; units that are not read are in none."""
    begin, size = 0, 0
    for i, (file, first) in enumerate(zip(units.files, units.firsts, strict=True)):
        if first is None:
            if size:
                yield begin, i
            begin, size = i + 1, 0
            continue
        size += max(1, file.stat().st_size)
        if size >= _CHUNK_BYTES:
            yield begin, i + 1
            begin, size = i + 1, 0
    if size:
        yield begin, len(units.files)


_DOCUMENTS, _TOKENS, _STOP = range(3)
_shared: Any = None
"""In a process of the pool: documents and ids of all processes, and whether to stop."""


class _Stopped(Exception):
    """Raised where another process has failed, or Ctrl-C has ended the parent."""


def _begin_process(shared: Any, threads: int, parent: int, folder: str) -> None:
    """Set up a process of the pool, which works in the parent's folder, and tokenizes with so many threads."""
    global _shared
    _shared = shared
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops all
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # which `tokenizers` reads when it is first used
    os.chdir(folder)


def _tokenize_chunk(data: DataConfig, units: Units, folder: Path) -> None:
    """Write the parts of a chunk, in a process of the pool."""
    tokenizer = load_tokenizer(data.tokenizer, data.end_of_document)
    new = [0, 0]

    def tell() -> None:
        with _shared.get_lock():
            _shared[_DOCUMENTS] += new[0]
            _shared[_TOKENS] += new[1]
        new[:] = [0, 0]
        if _shared[_STOP]:
            raise _Stopped

    def count(num_tokens: int) -> None:
        new[0] += 1
        new[1] += num_tokens
        if new[0] >= _DOCUMENTS_AT_ONCE:
            tell()

    with suppress(_Stopped):
        tell()
        _tokenize(data, tokenizer, units, folder, _BadRows(data, 0), count)
        tell()


class _BadRows:
    """Rows that cannot be read."""

    def __init__(self, data: DataConfig, number: int):
        """Counting starts at the `number` of those that were left out before."""
        self.data, self.number = data, number
        self.by_unit: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
        """Unit → number of each bad row there, and the reason."""

    def note(self, unit: int, row: int, why: str) -> None:
        """Note one more; DataError if there are too many."""
        self.number += 1
        if self.number > self.data.max_bad_rows:
            first = next((rows[0][1] for _, rows in sorted(self.by_unit.items()) if rows), why)
            raise DataError(describe_bad(self.number, first, self.data))
        self.by_unit[unit].append((row, why))


def describe_bad(number: int, first: str, data: DataConfig) -> str:
    """Reason why bad rows are refused; `first` is the place and the reason of the first one."""
    if data.max_bad_rows == 0:
        return first
    rows = plural(number, "bad row")
    return f"{rows} of {data.source!r}, more than data.max_bad_rows={data.max_bad_rows}; the first: {first}"


class TokenizingProgress:
    """Reports the progress of preparing on stderr, every few seconds."""

    def __init__(self, data: DataConfig, num_documents: int, num_tokens: int):
        """Counting starts at the documents and ids that were there already."""
        self.data = data
        self.num_documents, self.num_tokens = num_documents, num_tokens
        self.began_with = num_documents, num_tokens
        self.started = self.said = time.perf_counter()

    def say_begin(self, num_left: int, num_units: int) -> None:
        """Say where a start goes on, which has so many units left of its own."""
        if not self.num_documents:
            return
        of_files = f"; {num_left:,} of {plural(num_units, 'file', ',')} are left" * (num_units > 1)
        done = plural(self.num_tokens, "token", ",")
        print(f"{self.data.source}: going on after {done}{of_files}", file=sys.stderr, flush=True)

    def count(self, num_tokens: int) -> None:
        """Count one more document, of `num_tokens` ids."""
        self.num_documents += 1
        self.num_tokens += num_tokens
        self._say()

    def follow(self, num_documents: int, num_tokens: int) -> None:
        """Count the documents and ids of all processes since the start."""
        self.num_documents, self.num_tokens = self.began_with[0] + num_documents, self.began_with[1] + num_tokens
        self._say()

    def end(self) -> Tokenized:
        """Everything that this start has tokenized."""
        documents, tokens = self.num_documents - self.began_with[0], self.num_tokens - self.began_with[1]
        return Tokenized(documents, tokens, time.perf_counter() - self.started)

    def _say(self) -> None:
        now = time.perf_counter()
        if now < self.said + _SECONDS_BETWEEN_LINES:
            return
        self.said = now
        rate = (self.num_tokens - self.began_with[1]) / (now - self.started)
        done = f"{plural(self.num_tokens, 'token', ',')} of {plural(self.num_documents, 'document', ',')}"
        line = f"{self.data.source}: {done}, {rate:,.0f} tokens/s"
        if self.data.max_tokens and rate:
            left_s = (self.data.max_tokens - self.num_tokens) / rate
            line += f", {self.num_tokens / self.data.max_tokens:.0%}, {left_s / 60:,.0f} min left"
        print(line, file=sys.stderr, flush=True)
