"""Tokenize a corpus once into one flat file of token ids.

    folder/<fingerprint>/tokens.bin     ids, little-endian uint16 or uint32, every document with its begin and its end
    folder/<fingerprint>/tokens.json    what they are
    folder/<fingerprint>.<random>.partial/
                                        both while they are written; one that a kill has left may be deleted

The fingerprint is a hash of everything that decides the ids. For local files it sees names, sizes and modification
times, not contents; for a hub dataset only the name and the split: delete the folder to fetch a newer revision.

[Note: no locks]
File locks fail or hang on some shared filesystems. Whoever finds no folder of the fingerprint writes one under a name
of its own and renames it when it is whole. A rename onto a folder that is not empty fails, so the first one wins, what
is there is whole and never changes under its readers, and who comes later has worked in vain and uses it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np

from dtlayout.config import DataConfig
from dtlayout.data.sources import list_files, open_documents
from dtlayout.data.tokenizer import Ids, Tokenizer, load_tokenizer
from dtlayout.errors import DataError

TOKENS_NAME = "tokens.bin"
INFO_NAME = "tokens.json"

_FORMAT = 1  # part of the fingerprint: raise it when the same corpus would give other bytes
_BATCH_CHARACTERS = 1 << 20  # tokenized at once: enough for every core to have work, little enough to forget


def prepare_tokens(data: DataConfig) -> Path:
    """Tokenize `data.source` below `data.folder`, unless that is done already; the folder that `TokenFile.open` reads.

    `max_tokens` stops after exactly that many ids, 0 takes all; the last document may then be cut and lack its end.
    Any number of processes may call this at once on one filesystem: [Note: no locks].
    """
    tokenizer = load_tokenizer(data.tokenizer, data.end_of_document)
    provenance = {name: getattr(data, name) for name in ("source", "text_field", "split", "max_tokens")}
    target = Path(data.folder) / _fingerprint(provenance, tokenizer, list_files(data.source))
    own = target.with_name(f"{target.name}.{uuid4().hex[:8]}.partial")
    try:
        if (target / INFO_NAME).exists():
            return target
        _refuse_unfinished(target)
        own.mkdir(parents=True)
        try:
            info = _write_tokens(data, tokenizer, own / TOKENS_NAME)
            info |= {"tokenizer": data.tokenizer, **provenance}
            (own / INFO_NAME).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
            _publish(own, target)
        finally:
            shutil.rmtree(own, ignore_errors=True)
    except OSError as error:
        raise DataError(f"cannot write tokens to {str(target)!r}: {error}") from error
    return target


def _publish(own: Path, target: Path) -> None:
    """Make what is whole the tokens that all read, unless somebody was faster: [Note: no locks]."""
    try:
        own.rename(target)
    except OSError:
        if (target / INFO_NAME).exists():
            return
        _refuse_unfinished(target)
        raise


def _refuse_unfinished(target: Path) -> None:
    """DataError if some files are where tokens are to be, and not all of them: an older version left such folders."""
    if target.exists() and any(target.iterdir()):
        raise DataError(f"{str(target)!r} has no {INFO_NAME}, so it is not whole; delete it")


def _fingerprint(provenance: dict[str, object], tokenizer: Tokenizer, files: list[Path]) -> str:
    stats = [(str(file.absolute()), file.stat()) for file in files]
    sizes = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    seen = {**provenance, "format": _FORMAT, "tokenizer": tokenizer.fingerprint, "files": sizes}
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:16]


def _write_tokens(data: DataConfig, tokenizer: Tokenizer, path: Path) -> dict[str, object]:
    """Write the ids; what they are."""
    documents = open_documents(data.source, data.split, data.text_field)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    digest = hashlib.sha256()
    num_tokens = num_documents = 0
    has_text = False
    with path.open("wb") as file:
        for ids in _encode_documents(documents, tokenizer):
            kept = ids[: data.max_tokens - num_tokens] if data.max_tokens else ids
            written = kept.astype(dtype).tobytes()
            file.write(written)
            digest.update(written)
            num_documents += 1
            num_tokens += kept.size
            has_text = has_text or ids.size > len(tokenizer.begin) + 1
            if num_tokens == data.max_tokens:
                break
        file.flush()
        os.fsync(file.fileno())  # the rename must not reach the disk before the bytes
    if not has_text:
        raise DataError(f"{data.source!r} holds no text: {num_documents} documents and all of them empty")
    return {
        "dtype": dtype.name, "num_tokens": num_tokens, "num_documents": num_documents,
        "vocab_size": tokenizer.vocab_size, "end_of_document": tokenizer.end_of_document, "sha256": digest.hexdigest(),
    }  # fmt: skip


def _encode_documents(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[Ids]:
    begin, end = (np.array(ids, dtype=np.int64) for ids in (tokenizer.begin, [tokenizer.end_of_document]))
    for texts in _batch_documents(documents):
        for ids in tokenizer.encode_batch(texts):
            yield np.concatenate((begin, ids, end))


def _batch_documents(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    num_characters = 0
    for text in documents:
        batch.append(text)
        num_characters += len(text) + 1  # + 1: empty documents fill a batch too
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch
