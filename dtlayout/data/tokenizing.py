"""Tokenize the units of a corpus that no part holds yet: in this process, or in several that share its files.

[Note: chunks]
Files that follow each other make a chunk, some 64 MB of them unpacked, or one file that is larger. Each process takes
the next chunk when it is done with one, and writes parts of its own. Parts say which rows of which file they cover, so
joining gives the tokens of one process to the byte, whoever has tokenized what.
"""

import os
import signal
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dtlayout.base.errors import DataError
from dtlayout.base.formatting import format_bytes, plural
from dtlayout.base.interpreter import elsewhere
from dtlayout.base.parent import end_with_parent
from dtlayout.base.terminal import say_at_once
from dtlayout.config.sections import DataConfig
from dtlayout.data.documents import DocumentRead, read_documents
from dtlayout.data.pieces import PieceWriter, find_pieces
from dtlayout.data.sources import Corpus, open_corpus
from dtlayout.data.tokenizer import Tokenizer, load_tokenizer
from dtlayout.data.unpacked import estimate_unpacked_bytes

_PART_TOKENS = 1 << 24  # tokenized in ten seconds or so, the work that a kill can cost
_CHUNK_BYTES = 1 << 26
_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_OF_RATE = 60.0  # over which a line's speed is the mean: others may begin or end to use the machine
_MOST_NAMED = 20
"""Broken files that are named with their reason; the others are counted."""
_DOCUMENTS_AT_ONCE = 256  # that a process counts before it tells the others


@dataclass(frozen=True)
class Tokenized:
    """Work that was done, beside what was there before."""

    num_documents: int
    num_tokens: int
    seconds: float
    num_read: int = 0
    """Bytes of files, or rows of the hub's dataset, that were read for that; of files packed bytes."""


class BrokenFiles(DataError):
    """Raised where files of a source cannot be read to their end, after all others were tokenized."""


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
    folder: Path = Path()
    """Folder that all files of the corpus share, those of other units too."""

    def take(self, begin: int, end: int) -> "Units":
        """Some of the units."""
        return Units(
            self.files[begin:end], self.names[begin:end], self.firsts[begin:end], self.known[begin:end], self.folder
        )  # fmt: skip


def dtype_of(tokenizer: Tokenizer) -> "np.dtype[Any]":
    """Number format of ids in files."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def write_parts(
    data: DataConfig, tokenizer: Tokenizer, units: Units, folder: Path, chosen: range, processes: int = 1
) -> Tokenized:
    """Write the parts of the `chosen` units that are not there yet; as much as `max_tokens` needs.

    DataError for more bad rows than `max_bad_rows`, and BrokenFiles where a file cannot be read to its end.
    """
    chains = find_pieces(folder.parent, units.names)
    found = [[placed.piece for placed in chain] for chain in chains]
    known = [sum(piece.num_tokens for piece in chain) for chain in found]
    firsts = [
        None if (chain and chain[-1].is_end) or i not in chosen else chain[-1].end_row if chain else 0
        for i, chain in enumerate(found)
    ]
    units = replace(units, firsts=firsts, known=known)
    first_missing = next((i for i, first in enumerate(firsts) if first is not None), None)
    limit = data.max_tokens or float("inf")
    if first_missing is None or sum(known[: first_missing + 1]) >= limit:
        return Tokenized(0, 0, 0.0)
    pieces = [piece for i in chosen for piece in found[i]]
    num_left = sum(first is not None for first in firsts)
    before = TokenizingCounts(
        documents=sum(piece.num_documents for piece in pieces), tokens=sum(piece.num_tokens for piece in pieces),
        files=len(chosen) - num_left,
        read=sum(units.files[i].stat().st_size for i in chosen if firsts[i] is None) if units.files else 0,
    )  # fmt: skip
    bad = _BadRows(data, sum(piece.num_bad for chain in found for piece in chain))
    corpus = _open_units(data, units)
    total = sum(units.files[i].stat().st_size for i in chosen) if units.files else corpus.num_rows
    progress = TokenizingProgress(data, before, total, len(chosen) if units.files else 0)
    progress.say_begin(num_left, len(chosen))
    with _saying_the_end():
        if processes > 1 and num_left > 1:
            broken = _tokenize_in_processes(data, units, folder, progress, processes)
        else:
            broken = _tokenize(corpus, data, tokenizer, units, folder, bad, progress.count)
    if broken:
        raise BrokenFiles(describe_broken(broken, len(chosen), data))
    return progress.end()


def describe_broken(broken: Sequence[str], num_files: int, data: DataConfig) -> str:
    """Reasons why files are not read to their end, of so many that were asked for."""
    if num_files == 1:
        return broken[0]
    head = (
        f"{len(broken):,} of {plural(num_files, 'file', ',')} of {data.source!r} cannot be read to the end; what could "
        f"be read is tokenized and kept, and once they are whole the same command reads no others"
    )
    more = [f"and {len(broken) - _MOST_NAMED:,} more"] * (len(broken) > _MOST_NAMED)
    return "\n".join([head, *broken[:_MOST_NAMED], *more])


@contextmanager
def _saying_the_end() -> Iterator[None]:
    """Say at once that Ctrl-C or SIGTERM was seen: a part is written before the command ends, which takes some seconds.

    SIGTERM, which Slurm sends at the end of a job's time, ends the command with 143.
    """
    usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or any(signal.getsignal(number) is not handler for number, handler in usual.items()):
        yield  # a run has handlers of its own
        return

    def say(number: int, frame: Any) -> None:
        say_at_once("saving a part, ending")
        if number == signal.SIGTERM:
            raise SystemExit(128 + number)
        signal.default_int_handler(number, frame)

    for number in usual:
        signal.signal(number, say)
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def _open_units(data: DataConfig, units: Units) -> Corpus:
    """Units of a source, ready to be read."""
    fields = {data.messages_field or data.text_field, *(["tools"] if data.messages_field else [])}
    return open_corpus(data.source, [*units.files], data.split, fields, units.folder)


def _tokenize(
    corpus: Corpus,
    data: DataConfig,
    tokenizer: Tokenizer,
    units: Units,
    folder: Path,
    bad: "_BadRows",
    count: Callable[["TokenizingCounts"], None],
) -> list[str]:
    """Write parts of units; a reason for each file that is not read to its end. `count` is told of each document."""
    limit, known = data.max_tokens or float("inf"), np.cumsum(units.known)
    firsts, broken = [*units.firsts], list[str]()
    writer, unit, num_read = PieceWriter(folder, dtype_of(tokenizer), _PART_TOKENS), -1, 0
    meter = _Meter(units.firsts)
    try:
        with closing(read_documents(corpus, data, tokenizer, firsts, bad.note)) as documents:
            for read in documents:
                if read.unit != unit:
                    unit = read.unit
                    writer.begin(units.names[unit], firsts[unit] or 0)
                if read.document is None:
                    if read.broken:
                        _note_broken(read.broken, broken, len(units.files))
                    else:
                        writer.end(read.row)
                    writer.close_piece(bad.by_unit[unit])
                    count(meter.follow(read)._replace(files=1))
                    unit = -1
                    continue
                writer.add(read.document, read.row)
                count(meter.follow(read)._replace(documents=1, tokens=read.document.ids.size))
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
    return broken


def _note_broken(why: str, broken: list[str], num_files: int) -> None:
    """Note the reason why a file is not read to its end, and say that others follow."""
    broken.append(why)
    if num_files > 1:
        print(f"{why}; going on with other files", file=sys.stderr, flush=True)


class TokenizingCounts(NamedTuple):
    """Numbers that grow while a corpus is tokenized."""

    documents: int = 0
    tokens: int = 0
    files: int = 0
    """Files that are done, the broken ones included."""
    read: int = 0
    """Bytes of files, packed where they are packed, or rows of the hub's dataset."""
    passed: int = 0
    """Bytes or rows among `read` that were not tokenized: they lie before the place from which a start goes on."""

    def plus(self, other: "TokenizingCounts") -> "TokenizingCounts":
        """The sums."""
        return TokenizingCounts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class _Meter:
    """Finds out how much of each unit was read between two documents."""

    def __init__(self, firsts: Sequence[int | None]):
        self._firsts = firsts
        self._unit, self._position = -1, 0

    def follow(self, read: DocumentRead) -> TokenizingCounts:
        """Bytes or rows since the document before."""
        is_first = read.unit != self._unit
        moved = read.position - (0 if is_first else self._position)
        self._unit, self._position = read.unit, read.position
        is_passed = read.broken or (is_first and self._firsts[read.unit])
        return TokenizingCounts(read=moved, passed=moved if is_passed else 0)


def _tokenize_in_processes(
    data: DataConfig, units: Units, folder: Path, progress: "TokenizingProgress", processes: int
) -> list[str]:
    """Write parts of units in several processes: [Note: chunks]; a reason for each file that is not read to its end."""
    chunks, here = [units.take(begin, end) for begin, end in cut_into_chunks(units, processes)], os.getcwd()
    processes = min(processes, len(chunks))
    spawning = get_context("spawn")  # a fork would copy the tokenizer's threads, which do not run in the copy
    shared = spawning.Array("q", _STOP + 1)
    threads = max(1, count_cores() // processes)
    pool = ProcessPoolExecutor(processes, spawning, _begin_process, (shared, threads, os.getpid(), here))
    asked = list[Future[list[str]]]()
    try:
        with elsewhere():
            asked += [pool.submit(_tokenize_chunk, data, chunk, folder) for chunk in chunks]
        left = set(asked)
        while left:
            done, left = wait(left, _SECONDS_BETWEEN_LINES, FIRST_COMPLETED)
            progress.follow(TokenizingCounts(*shared[:_STOP]))
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
        progress.follow(TokenizingCounts(*shared[:_STOP]))
    return [why for each in asked for why in each.result()]


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cut_into_chunks(units: Units, processes: int) -> Iterator[tuple[int, int]]:
    """First unit of each chunk, and the one behind its last; units that are not read are in none.

    Chunks are smaller where little is left, so that no process is without one while another has several units.
    """
    sizes = [
        None if first is None else estimate_unpacked_bytes(file)
        for file, first in zip(units.files, units.firsts, strict=True)
    ]
    most = min(_CHUNK_BYTES, sum(each or 0 for each in sizes) / processes)
    begin, size = 0, 0
    for i, left in enumerate(sizes):
        if left is None:
            if size:
                yield begin, i
            begin, size = i + 1, 0
            continue
        size += left
        if size >= most:
            yield begin, i + 1
            begin, size = i + 1, 0
    if size:
        yield begin, len(units.files)


_STOP = len(TokenizingCounts._fields)
_shared: Any = None
"""In a process of the pool: `TokenizingCounts` of all processes, and whether to stop."""


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


def _tokenize_chunk(data: DataConfig, units: Units, folder: Path) -> list[str]:
    """Write the parts of a chunk, in a process of the pool; a reason for each file that is not read to its end."""
    tokenizer = load_tokenizer(data.tokenizer, data.end_of_document)
    new = TokenizingCounts()

    def tell() -> None:
        nonlocal new
        with _shared.get_lock():
            for i, number in enumerate(new):
                _shared[i] += number
        new = TokenizingCounts()
        if _shared[_STOP]:
            raise _Stopped

    def count(more: TokenizingCounts) -> None:
        nonlocal new
        new = new.plus(more)
        if new.documents >= _DOCUMENTS_AT_ONCE:
            tell()

    broken = list[str]()
    with suppress(_Stopped):
        tell()
        corpus = _open_units(data, units)
        broken = _tokenize(corpus, data, tokenizer, units, folder, _BadRows(data, 0), count)
        tell()
    return broken


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
    """Reason why bad rows are refused; `first` is the place in the source and the reason of the first one."""
    if data.max_bad_rows == 0:
        return (
            f"reading {data.source!r} broke at {first} (data.max_bad_rows=N leaves out up to N bad rows of each source)"
        )
    rows = plural(number, "bad row")
    return (
        f"{rows} of {data.source!r}, more than data.max_bad_rows={data.max_bad_rows}; the first: {first} (the limit "
        f"counts the rows of all files of a source, earlier starts included; nothing behind the last one was read, so "
        f"there may be more)"
    )


class TokenizingProgress:
    """Reports the progress of preparing on stderr, every few seconds."""

    def __init__(self, data: DataConfig, before: TokenizingCounts, total: int = 0, num_files: int = 0):
        """`before` is what was there already. `total` are all bytes of `num_files` files, or all rows of a dataset on
        the hub, which has no files; 0 where nobody knows.
        """
        self.data, self.before, self.total, self.num_files = data, before, total, num_files
        self.counts = before
        self.started = self.said = time.perf_counter()
        self._recent = deque([(self.started, before)])  # from the begin of the last minute on

    def say_begin(self, num_left: int, num_units: int) -> None:
        """Say where a start goes on, which has so many units left of its own."""
        if not self.counts.documents:
            return
        of_files = f"; {num_left:,} of {plural(num_units, 'file', ',')} are left" * (num_units > 1)
        done = plural(self.counts.tokens, "token", ",")
        print(f"{self.data.source}: going on after {done}{of_files}", file=sys.stderr, flush=True)

    def count(self, more: TokenizingCounts) -> None:
        """Count what is new since the last call."""
        self.counts = self.counts.plus(more)
        self._say()

    def follow(self, since: TokenizingCounts) -> None:
        """Count what is new since the start, in all processes."""
        self.counts = self.before.plus(since)
        self._say()

    def end(self) -> Tokenized:
        """Everything that this start has tokenized."""
        documents, tokens, _, read, passed = (now - then for now, then in zip(self.counts, self.before, strict=True))
        return Tokenized(documents, tokens, time.perf_counter() - self.started, read - passed)

    def _say(self) -> None:
        now = time.perf_counter()
        if now < self.said + _SECONDS_BETWEEN_LINES:
            return
        self.said = now
        while len(self._recent) > 1 and self._recent[1][0] <= now - _SECONDS_OF_RATE:
            self._recent.popleft()
        print(f"{self.data.source}: {', '.join(self._describe(now))}", file=sys.stderr, flush=True)
        self._recent.append((now, self.counts))

    def _describe(self, now: float) -> Iterator[str]:
        """How far it is, the speed of the last minute, and how long the rest takes at that speed."""
        counts, (then, past) = self.counts, self._recent[0]
        tokens_per_s = (counts.tokens - past.tokens) / (now - then)
        read_per_s = (counts.read - counts.passed - past.read + past.passed) / (now - then)
        ends = []  # share that is done, of what, and what is left in seconds: the sooner one counts
        if self.total:
            whole = format_bytes(self.total, 1) if self.num_files else plural(self.total, "row", ",")
            ends.append((counts.read / self.total, whole, _divide(self.total - counts.read, read_per_s)))
        if most := self.data.max_tokens:
            left_s = _divide(most - counts.tokens, tokens_per_s)
            ends.append((counts.tokens / most, plural(most, "token", ","), left_s))
        if ends:
            share, whole, left_s = max(ends)
            yield f"{min(share, 1):.0%} of {whole}"
        if self.num_files > 1:
            yield f"file {min(counts.files + 1, self.num_files):,} of {self.num_files:,}"
        yield f"{plural(counts.tokens, 'token', ',')} of {plural(counts.documents, 'document', ',')}"
        yield f"{tokens_per_s:,.0f} tokens/s"
        if ends and left_s < float("inf"):
            yield f"{_describe_time(left_s)} left"


def _divide(left: float, per_s: float) -> float:
    """Seconds for what is left; infinite where nothing moves."""
    return max(left, 0) / per_s if per_s > 0 else float("inf")


def _describe_time(seconds: float) -> str:
    """A time as people say it.

    >>> [_describe_time(each) for each in (42, 1620, 20_000)]
    ['42 s', '27 min', '5.6 h']
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:,.1f} h"
