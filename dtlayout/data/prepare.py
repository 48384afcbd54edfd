"""Tokenize a corpus once into flat files of token ids.

    folder/<fingerprint>/tokens.bin     ids, little-endian uint16 or uint32, every document with its begin and its end
    folder/<fingerprint>/documents.bin  offset of each document, and the end of the last one; little-endian int64
    folder/<fingerprint>/taught.bin     loss mask: for each id whether it is a target, uint8; only for conversations
    folder/<fingerprint>/tokens.json    description of the files
    folder/<fingerprint>/units.json     which documents came from which file (`dtlayout.data.pieces`)
    folder/<fingerprint>.parts/         while they are prepared: parts that are whole, from which the next process
                                        goes on; if a corpus is not wanted any more they may be deleted

The fingerprint is a hash of everything that decides the ids. Of local files it sees names below the folder that they
share, sizes and modification times, not contents and not where that folder is: so prepared tokens may be moved with
their corpus. Of a hub dataset it sees only the name and the split: delete the folder to fetch a newer revision. What a
file's rows became is found again when another file of the corpus has changed.

[Note: no locks]
File locks fail or hang on some shared filesystems. Every file and folder is written under a name of its own and renamed
when it is whole, so a file that is there is whole. Each process writes parts of its own, and any number of processes
may do so at once. The folder never changes under its readers: a rename onto a folder that is not empty fails. So the
first process wins, and a later one has worked in vain and uses the first one's folder.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np

from dtlayout.base.errors import DataError
from dtlayout.base.formatting import plural
from dtlayout.config.sections import DataConfig
from dtlayout.data.chat import load_template
from dtlayout.data.pieces import (
    DOCUMENTS_NAME,
    INFO_NAME,
    LOSS_MASK_NAME,
    TOKENS_NAME,
    PlacedPiece,
    find_pieces,
    forget_parts,
    write_units,
)
from dtlayout.data.sources import find_shared_folder, list_files
from dtlayout.data.tokenizer import Tokenizer, load_tokenizer
from dtlayout.data.tokenizing import Tokenized, Units, describe_bad, dtype_of, write_parts
from dtlayout.data.unpacked import estimate_unpacked_bytes

HASH_KEYS = {TOKENS_NAME: "sha256", DOCUMENTS_NAME: "documents_sha256", LOSS_MASK_NAME: "taught_sha256"}
"""File → key of tokens.json with its hash."""

# Parts of the fingerprint: raise one when the same corpus would give other bytes, or other refusals.
_FORMAT = 3  # of plain text
_CHAT_FORMAT = 4  # of conversations; 4: messages are checked, and those without an answer counted

_BYTES_PER_TOKEN = 4
"""Bytes of text that a token of a usual tokenizer stands for."""


def prepare_tokens(
    data: DataConfig, *, processes: int = 1, note: Callable[[Tokenized], None] = lambda done: None
) -> Path:
    """Tokenize `data.source` below `data.folder`, unless that is done already; the folder that `TokenFile.open` reads.

    `max_tokens` stops after exactly that many ids, 0 takes all; the last document may then be cut and lack its end.
    Work that takes longer than some seconds reports its progress on stderr, and goes on where it was killed. Any number
    of processes may call this at once on one filesystem: [Note: no locks]. Several `processes` of this machine share
    the files, and `note` is told what was tokenized. DataError for more bad rows than `max_bad_rows`; what was
    tokenized before is kept.
    """
    work = _open(data)
    target = work.target
    if (target / INFO_NAME).exists():
        return _refuse_bad(target, data)
    own = target.with_name(f"{target.name}.{uuid4().hex[:8]}.partial")
    try:
        _refuse_unfinished(target)
        work.parts.mkdir(parents=True, exist_ok=True)
        everything = range(len(work.units.names))
        note(write_parts(data, work.tokenizer, work.units, work.parts, everything, processes))
        own.mkdir()
        try:
            info = _join(find_pieces(work.parts.parent, work.units.names), own, work.tokenizer, data)
        finally:
            forget_parts()
        (own / INFO_NAME).write_text(json.dumps(info | work.provenance, indent=2) + "\n", encoding="utf-8")
        _publish(own, target)
    except OSError as error:
        if (target / INFO_NAME).exists():  # another process was done, and has removed the parts
            return target
        raise DataError(f"cannot write tokens to {str(target)!r}: {error}") from error
    finally:
        shutil.rmtree(own, ignore_errors=True)
        if (target / INFO_NAME).exists():  # so the last process leaves nothing that another still wrote
            shutil.rmtree(work.parts, ignore_errors=True)
        with suppress(OSError):  # parts are in it, or it is gone
            work.parts.rmdir()
    return target


class PreparedShard(NamedTuple):
    """A part of the files of a source, whose parts are written."""

    num_files: int
    """Files of the shard."""
    num_all: int
    """Files of the source."""
    parts: Path
    """Folder of the parts; where the whole source is prepared already, that of its tokens."""
    tokenized: Tokenized


def prepare_shard(data: DataConfig, shard: int, num_shards: int, *, processes: int = 1) -> PreparedShard:
    """Tokenize one of `num_shards` parts of the files of `data.source`, and join nothing; `shard` counts from 0.

    Shards are files that follow each other, as equal in unpacked size as whole files can be. Once all are done, on
    whatever machines, `prepare_tokens` joins them, and tokenizes what is missing. DataError for a source that has no
    files here, and with `max_tokens`, which counts from the first file on.
    """
    if data.max_tokens:
        raise DataError(
            f"data.max_tokens={data.max_tokens} counts tokens from the first file on, so no shard knows its share; use "
            f"max_tokens=0, or prepare the source without --shard"
        )
    work = _open(data)
    if not work.units.files:
        raise DataError(
            f"data.source={data.source!r} comes from the hub as one stream; hf download --repo-type dataset "
            f'{data.source} --local-dir FOLDER clones it, and source = "FOLDER" has files that shards share'
        )
    chosen = _choose(work.units.files, shard, num_shards)
    if (work.target / INFO_NAME).exists():
        return PreparedShard(len(chosen), len(work.units.files), work.target, Tokenized(0, 0, 0.0))
    try:
        _refuse_unfinished(work.target)
        work.parts.mkdir(parents=True, exist_ok=True)
        done = write_parts(data, work.tokenizer, work.units, work.parts, chosen, processes)
    except OSError as error:
        raise DataError(f"cannot write tokens to {str(work.parts)!r}: {error}") from error
    return PreparedShard(len(chosen), len(work.units.files), work.parts, done)


def estimate_unprepared_bytes(data: DataConfig) -> float:
    """Bytes of text that `prepare_tokens` would read of `data.source`, about; 0 where that is done already.

    Infinity for a dataset of the hub, which has to be fetched. DataError if the source or its tokenizer is not there.
    """
    work = _open(data)
    if (work.target / INFO_NAME).exists():
        return 0
    if not work.units.files:
        return math.inf
    size = sum(map(estimate_unpacked_bytes, work.units.files))
    return min(size, data.max_tokens * _BYTES_PER_TOKEN) if data.max_tokens else size


def _choose(files: Sequence[Path], shard: int, num_shards: int) -> range:
    """Numbers of the files of a shard: those whose middle lies in its part of all bytes, unpacked."""
    sizes = np.array([estimate_unpacked_bytes(file) for file in files], np.int64)
    middles = sizes.cumsum() - sizes / 2
    places = np.minimum(num_shards - 1, (middles * num_shards / sizes.sum()).astype(np.int64))
    begin, end = (int(np.searchsorted(places, number)) for number in (shard, shard + 1))
    return range(begin, end)


class _Work(NamedTuple):
    """Everything that is decided before a source is read."""

    tokenizer: Tokenizer
    units: Units
    provenance: dict[str, object]
    target: Path
    """Folder of the tokens once they are whole."""

    @property
    def parts(self) -> Path:
        """Folder of the parts until then."""
        return self.target.with_name(f"{self.target.name}.parts")


def _open(data: DataConfig) -> _Work:
    """Read the tokenizer of a source, and list its files."""
    tokenizer = load_tokenizer(data.tokenizer, data.end_of_document)
    files = list_files(data.source, data.split)
    provenance = _find_provenance(data)
    folder = find_shared_folder(files) if files else Path()
    names = _name_units(data, provenance, tokenizer, files, folder)
    units = Units(files, names, folder=folder)
    return _Work(tokenizer, units, provenance, Path(data.folder) / _hash([names, data.max_tokens]))


class NoText(DataError):
    """Raised when the text that was read has nothing to learn from."""

    num_tokens = 0
    """Number of ids that were read."""


def prepare_head(data: DataConfig, num_tokens: int, folder: Path) -> tuple[Path, bool] | None:
    """Folder with the first ids of `data.source`, like one of `prepare_tokens`, and whether the source has no more.

    It refuses the same errors in them as `prepare_tokens` does. Tokens that are prepared already are used whole, from
    their own folder. None where the first `num_tokens` ids hold nothing to learn from, and later ones might.
    """
    prepared = _open(data).target
    if (prepared / INFO_NAME).exists():
        return _refuse_bad(prepared, data), True
    asked = min(num_tokens, data.max_tokens or num_tokens)
    is_limit = asked == data.max_tokens
    try:
        head = prepare_tokens(replace(data, folder=str(folder), max_tokens=asked))
    except NoText as error:
        if is_limit or error.num_tokens < asked:
            raise
        return None
    return head, is_limit or json.loads((head / INFO_NAME).read_text(encoding="utf-8"))["num_tokens"] < asked


def _publish(own: Path, target: Path) -> None:
    """Rename the whole folder to the name that all read, unless another process was faster: [Note: no locks]."""
    try:
        own.rename(target)
    except OSError:
        if (target / INFO_NAME).exists():
            return
        _refuse_unfinished(target)
        raise


def _refuse_unfinished(target: Path) -> None:
    """Raise DataError if `target` has some files but no info: an older version left such folders."""
    # In this order: between two questions another process may have made it whole.
    if target.exists() and any(target.iterdir()) and not (target / INFO_NAME).exists():
        raise DataError(f"{str(target)!r} has no {INFO_NAME}, so it is not whole; delete it")


def _refuse_bad(target: Path, data: DataConfig) -> Path:
    """The folder of tokens; DataError if more rows were left out there than `max_bad_rows` allows now."""
    info = json.loads((target / INFO_NAME).read_text(encoding="utf-8"))
    if info.get("num_bad_rows", 0) > data.max_bad_rows:
        raise DataError(describe_bad(info["num_bad_rows"], info["first_bad_row"], data))
    return target


def _find_provenance(data: DataConfig) -> dict[str, object]:
    """Keys of a config that decide the ids of a source."""
    names = ["source", "split", "text_field", "tokenizer", "max_tokens"]
    if not data.messages_field:
        return {name: getattr(data, name) for name in names}
    template = load_template(data.chat_template, data.tokenizer).fingerprint
    return {**{name: getattr(data, name) for name in (*names, "messages_field", "loss_on")}, "template": template}


_PLACES = ("source", "split", "tokenizer", "max_tokens")
"""Keys of the provenance that say where something lies, or how much of it is taken, not what a row becomes."""


def _name_units(
    data: DataConfig, provenance: dict[str, object], tokenizer: Tokenizer, files: Sequence[Path], folder: Path
) -> list[str]:
    """A fingerprint for each unit of a source, with its files' names below `folder`."""
    what = {key: value for key, value in provenance.items() if key not in _PLACES}
    what |= {"format": _CHAT_FORMAT if data.messages_field else _FORMAT, "tokenizer": tokenizer.fingerprint}
    if not files:
        return [_hash({**what, "source": data.source, "split": data.split})]
    stats = [(os.path.relpath(file.absolute(), folder), file.stat()) for file in files]
    return [_hash({**what, "file": [name, stat.st_size, stat.st_mtime_ns]}) for name, stat in stats]


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _join(
    units: Sequence[Sequence[PlacedPiece]], folder: Path, tokenizer: Tokenizer, data: DataConfig
) -> dict[str, object]:
    """Append the pieces of all units to the files of a folder; returns the content of tokens.json."""
    num_tokens = num_documents = 0
    left = data.max_tokens or None
    used, whole = list[PlacedPiece](), list[Sequence[PlacedPiece]]()
    files = _Files(folder)
    files.append(DOCUMENTS_NAME, np.zeros(1, "<i8"))
    for chain in units:
        for placed in chain:
            if left == 0:
                break
            arrays = placed.read(dtype_of(tokenizer))
            if left is not None and placed.piece.num_tokens > left:
                arrays = _cut(arrays, left)
            files.append(TOKENS_NAME, arrays["ids"])
            files.append(DOCUMENTS_NAME, (num_tokens + arrays["lengths"].cumsum()).astype("<i8"))
            if "taught" in arrays:
                files.append(LOSS_MASK_NAME, arrays["taught"].astype(np.uint8))
            num_tokens += arrays["ids"].size
            num_documents += arrays["lengths"].size
            left = None if left is None else left - arrays["ids"].size
            used.append(placed)
        if left == 0:
            break
        if not (chain and chain[-1].piece.is_end):
            raise DataError(f"parts of {data.source!r} were removed while it was prepared; prepare it again")
        whole.append(chain)
    if not any(each.piece.has_text for each in used):
        what = "answer" if data.messages_field else "text"
        empty = NoText(f"{data.source!r} holds no {what}: {plural(num_documents, 'document')} and all of them empty")
        empty.num_tokens = num_tokens
        raise empty
    write_units(folder, whole)
    num_bad = sum(each.piece.num_bad for each in used)
    counts = {name: sum(getattr(each.piece, name) for each in used) for name in ("num_rewritten", "num_unanswered")}
    first_bad = next((each.piece.first_bad for each in used if each.piece.num_bad), "")
    if num_bad > data.max_bad_rows:  # each process knows its own alone
        raise DataError(describe_bad(num_bad, first_bad, data))
    return {
        "dtype": dtype_of(tokenizer).name, "num_tokens": num_tokens, "num_documents": num_documents,
        "vocab_size": tokenizer.vocab_size, "end_of_document": tokenizer.end_of_document,
        **{name: number for name, number in counts.items() if number},
        **({"num_bad_rows": num_bad, "first_bad_row": first_bad} if num_bad else {}),
        **{HASH_KEYS[name]: digest for name, digest in files.finish().items()},
    }  # fmt: skip


def _cut(arrays: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """The documents of the first ids of a piece, the last one cut there."""
    ends = arrays["lengths"].cumsum()
    lengths = arrays["lengths"][: int(np.searchsorted(ends, num_tokens)) + 1].copy()
    lengths[-1] -= lengths.sum() - num_tokens
    return {**{name: array[:num_tokens] for name, array in arrays.items()}, "lengths": lengths}


class _Files:
    """Flat files of a folder to which pieces are appended; what is written is hashed on the way, and not read again."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._hashes = {name: hashlib.sha256() for name in HASH_KEYS}

    def append(self, name: str, array: "np.ndarray[Any, Any]") -> None:
        """Append an array to a file."""
        content = array.tobytes()
        self._hashes[name].update(content)
        with (self.folder / name).open("ab") as file:
            file.write(content)

    def finish(self) -> dict[str, str]:
        """Flush all files to the disk; name → hash, of those that there are."""
        names = [name for name in HASH_KEYS if (self.folder / name).exists()]
        for name in names:
            with (self.folder / name).open("rb") as file:
                os.fsync(file.fileno())
        return {name: self._hashes[name].hexdigest() for name in names}
