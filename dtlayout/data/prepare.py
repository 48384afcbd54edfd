"""Tokenize a corpus once into flat files of token ids.

    folder/<fingerprint>/tokens.bin     ids, little-endian uint16 or uint32, every document with its begin and its end
    folder/<fingerprint>/documents.bin  offset of each document, and the end of the last one; little-endian int64
    folder/<fingerprint>/taught.bin     loss mask: for each id whether it is a target, uint8; only for conversations
    folder/<fingerprint>/tokens.json    description of the files
    folder/<fingerprint>.parts/         while they are prepared: parts that are whole, from which the next process
                                        goes on; if a corpus is not wanted any more they may be deleted

The fingerprint is a hash of everything that decides the ids. For local files it sees names, sizes and modification
times, not contents. For a hub dataset it sees only the name and the split: delete the folder to fetch a newer revision.

[Note: no locks]
File locks fail or hang on some shared filesystems. Every file and folder is written under a name of its own and renamed
when it is whole, so a file that is there is whole. A part is a function of the corpus: each process writes the same ids
into it, and any number of processes may write it at once. The folder never changes under its readers: a rename onto a
folder that is not empty fails. So the first process wins, and a later one has worked in vain and uses the first one's
folder.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4
from zipfile import BadZipFile

import numpy as np

from dtlayout.base.errors import DataError
from dtlayout.base.files import hash_file
from dtlayout.base.formatting import plural
from dtlayout.config.sections import DataConfig
from dtlayout.data.chat import load_template
from dtlayout.data.documents import Document, read_documents
from dtlayout.data.sources import list_files, open_corpus
from dtlayout.data.tokenizer import Tokenizer, load_tokenizer

TOKENS_NAME = "tokens.bin"
DOCUMENTS_NAME = "documents.bin"
LOSS_MASK_NAME = "taught.bin"
INFO_NAME = "tokens.json"
HASH_KEYS = {TOKENS_NAME: "sha256", DOCUMENTS_NAME: "documents_sha256", LOSS_MASK_NAME: "taught_sha256"}
"""File → key of tokens.json with its hash."""

_FORMAT = 2  # part of the fingerprint: raise it when the same corpus would give other bytes
_PART_TOKENS = 1 << 24  # tokenized in ten seconds or so, the work that a kill can cost
_SECONDS_BETWEEN_LINES = 10.0


def prepare_tokens(data: DataConfig) -> Path:
    """Tokenize `data.source` below `data.folder`, unless that is done already; the folder that `TokenFile.open` reads.

    `max_tokens` stops after exactly that many ids, 0 takes all; the last document may then be cut and lack its end.
    Work that takes longer than some seconds reports its progress on stderr, and goes on where it was killed. Any number
    of processes may call this at once on one filesystem: [Note: no locks].
    """
    tokenizer = load_tokenizer(data.tokenizer, data.end_of_document)
    files = list_files(data.source, data.split)
    provenance = _find_provenance(data)
    target = Path(data.folder) / _fingerprint(provenance, tokenizer, files)
    if (target / INFO_NAME).exists():
        return target
    parts = target.with_name(f"{target.name}.parts")
    own = target.with_name(f"{target.name}.{uuid4().hex[:8]}.partial")
    try:
        _refuse_unfinished(target)
        parts.mkdir(parents=True, exist_ok=True)
        found = _write_parts(data, tokenizer, files, parts)
        own.mkdir()
        info = _join(found, own, tokenizer, data)
        (own / INFO_NAME).write_text(json.dumps(info | provenance, indent=2) + "\n", encoding="utf-8")
        _publish(own, target)
    except OSError as error:
        if (target / INFO_NAME).exists():  # another process was done, and has removed the parts
            return target
        raise DataError(f"cannot write tokens to {str(target)!r}: {error}") from error
    finally:
        shutil.rmtree(own, ignore_errors=True)
        if (target / INFO_NAME).exists():  # so the last process leaves nothing that another still wrote
            shutil.rmtree(parts, ignore_errors=True)
        with suppress(OSError):  # parts are in it, or it is gone
            parts.rmdir()
    return target


class NoText(DataError):
    """Raised when the text that was read has nothing to learn from."""

    num_tokens = 0
    """Number of ids that were read."""


def prepare_head(data: DataConfig, num_tokens: int, folder: Path) -> tuple[Path, bool] | None:
    """Folder with the first ids of `data.source`, like one of `prepare_tokens`, and whether the source has no more.

    It refuses the same errors in them as `prepare_tokens` does. Tokens that are prepared already are used whole, from
    their own folder. None where the first `num_tokens` ids hold nothing to learn from, and later ones might.
    """
    files = list_files(data.source, data.split)
    tokenizer = load_tokenizer(data.tokenizer, data.end_of_document)
    prepared = Path(data.folder) / _fingerprint(_find_provenance(data), tokenizer, files)
    if (prepared / INFO_NAME).exists():
        return prepared, True
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


def _find_provenance(data: DataConfig) -> dict[str, object]:
    """Keys of a config that decide the ids of a source."""
    names = ["source", "split", "text_field", "tokenizer", "max_tokens"]
    if not data.messages_field:
        return {name: getattr(data, name) for name in names}
    template = load_template(data.chat_template, data.tokenizer).fingerprint
    return {**{name: getattr(data, name) for name in (*names, "messages_field", "loss_on")}, "template": template}


def _fingerprint(provenance: dict[str, object], tokenizer: Tokenizer, files: list[Path]) -> str:
    stats = [(str(file.absolute()), file.stat()) for file in files]
    sizes = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    seen = {**provenance, "format": _FORMAT, "tokenizer": tokenizer.fingerprint, "files": sizes}
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:16]


def _write_parts(data: DataConfig, tokenizer: Tokenizer, files: list[Path], folder: Path) -> list[Path]:
    """All parts of a corpus: those that are there already, and the others, which are written now."""
    parts, num_documents, num_tokens = _find_parts(folder)
    if data.max_tokens and num_tokens == data.max_tokens:
        return parts
    progress = _Progress(data, num_documents, num_tokens)
    corpus = open_corpus(data.source, files, data.split)
    documents = read_documents(corpus, data, tokenizer, skip=num_documents)
    left = data.max_tokens - num_tokens if data.max_tokens else None
    for part in _gather(_take(documents, left), progress):
        path = folder / f"{len(parts):06}.npz"
        _write_part(part, path, tokenizer)
        parts.append(path)
    return parts


def _find_parts(folder: Path) -> tuple[list[Path], int, int]:
    """Parts that are whole, from the first one on; their numbers of documents and of ids."""
    parts: list[Path] = []
    num_documents = num_tokens = 0
    with suppress(FileNotFoundError, BadZipFile, ValueError, EOFError, KeyError):  # the next part is not there
        while True:
            path = folder / f"{len(parts):06}.npz"
            with np.load(path) as part:
                lengths = part["lengths"]
            parts.append(path)
            num_documents += lengths.size
            num_tokens += int(lengths.sum())
    return parts, num_documents, num_tokens


def _take(documents: Iterator[Document], num_tokens: int | None) -> Iterator[Document]:
    """The documents of the first `num_tokens` ids, the last one cut there; None takes all."""
    for document in documents:
        if num_tokens is not None:
            loss_mask = None if document.loss_mask is None else document.loss_mask[:num_tokens]
            document = document._replace(ids=document.ids[:num_tokens], loss_mask=loss_mask)
            num_tokens -= document.ids.size
        yield document
        if num_tokens == 0:
            return


def _gather(documents: Iterator[Document], progress: "_Progress") -> Iterator[list[Document]]:
    """Documents in parts of about `_PART_TOKENS` ids."""
    part: list[Document] = []
    num_tokens = 0
    for document in documents:
        part.append(document)
        num_tokens += document.ids.size
        progress.count(document.ids.size)
        if num_tokens >= _PART_TOKENS:
            yield part
            part, num_tokens = [], 0
    if part:
        yield part


def _write_part(part: list[Document], path: Path, tokenizer: Tokenizer) -> None:
    arrays = {
        "ids": np.concatenate([document.ids for document in part]).astype(_dtype(tokenizer)),
        "lengths": np.array([document.ids.size for document in part], dtype="<i8"),
        "has_text": np.array(any(document.has_text for document in part)),
    }
    if part[0].loss_mask is not None:
        arrays["num_rewritten"] = np.array(sum(document.num_rewritten for document in part))
        arrays["taught"] = np.concatenate([document.loss_mask for document in part if document.loss_mask is not None])
    own = path.with_name(f"{uuid4().hex[:8]}.partial")
    try:
        with own.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())  # the rename must not reach the disk before the bytes
        own.replace(path)
    finally:
        own.unlink(missing_ok=True)


def _join(parts: list[Path], folder: Path, tokenizer: Tokenizer, data: DataConfig) -> dict[str, object]:
    """Append the parts to the files of a folder; returns the content of tokens.json."""
    num_tokens = num_documents = num_rewritten = 0
    has_text = False
    _append(folder / DOCUMENTS_NAME, np.zeros(1, "<i8"))
    for path in parts:
        try:
            with np.load(path) as part:
                arrays = dict(part)
        except (BadZipFile, ValueError, EOFError, KeyError) as error:
            raise DataError(f"{str(path)!r} is damaged ({error}); delete {str(path.parent)!r}") from error
        _append(folder / TOKENS_NAME, arrays["ids"])
        _append(folder / DOCUMENTS_NAME, (num_tokens + arrays["lengths"].cumsum()).astype("<i8"))
        if "taught" in arrays:
            _append(folder / LOSS_MASK_NAME, arrays["taught"].astype(np.uint8))
            num_rewritten += int(arrays["num_rewritten"])
        num_tokens += arrays["ids"].size
        num_documents += arrays["lengths"].size
        has_text = has_text or bool(arrays["has_text"])
    if not has_text:
        what = "answer" if data.messages_field else "text"
        empty = NoText(f"{data.source!r} holds no {what}: {plural(num_documents, 'document')} and all of them empty")
        empty.num_tokens = num_tokens
        raise empty
    return {
        "dtype": _dtype(tokenizer).name, "num_tokens": num_tokens, "num_documents": num_documents,
        "vocab_size": tokenizer.vocab_size, "end_of_document": tokenizer.end_of_document,
        **({"num_rewritten": num_rewritten} if num_rewritten else {}),
        **{key: _finish(folder / name) for name, key in HASH_KEYS.items() if (folder / name).exists()},
    }  # fmt: skip


def _append(path: Path, array: "np.ndarray[Any, Any]") -> None:
    with path.open("ab") as file:
        file.write(array.tobytes())


def _finish(path: Path) -> str:
    """Flush a file to the disk; returns its hash."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return hash_file(path)


def _dtype(tokenizer: Tokenizer) -> "np.dtype[Any]":
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


class _Progress:
    """Reports the progress of preparing on stderr, every few seconds."""

    def __init__(self, data: DataConfig, num_documents: int, num_tokens: int):
        """Counting starts at the documents and ids that were there already."""
        self.data = data
        self.num_documents, self.num_tokens, self.first = num_documents, num_tokens, num_tokens
        self.started = self.said = time.perf_counter()
        if num_documents:
            print(f"{data.source}: going on after {plural(num_tokens, 'token', ',')}", file=sys.stderr, flush=True)

    def count(self, num_tokens: int) -> None:
        """Count one more document, of `num_tokens` ids."""
        self.num_documents += 1
        self.num_tokens += num_tokens
        now = time.perf_counter()
        if now < self.said + _SECONDS_BETWEEN_LINES:
            return
        self.said = now
        rate = (self.num_tokens - self.first) / (now - self.started)
        done = f"{plural(self.num_tokens, 'token', ',')} of {plural(self.num_documents, 'document', ',')}"
        line = f"{self.data.source}: {done}, {rate:,.0f} tokens/s"
        if self.data.max_tokens:
            left_s = (self.data.max_tokens - self.num_tokens) / rate
            line += f", {self.num_tokens / self.data.max_tokens:.0%}, {left_s / 60:,.0f} min left"
        print(line, file=sys.stderr, flush=True)
