"""Pieces: what rows of one unit of a corpus became, kept so that they need not be tokenized again.

A unit is a file, or a dataset of the hub. Its fingerprint is a hash of everything that decides its ids, so that a piece
is found again by whoever needs the unit: the process that goes on after a kill, and the next preparation after another
file was mended.

    FOLDER/<fingerprint>.parts/*.npz    pieces of units while a corpus is prepared: ids, lengths, loss mask, `pieces`
    FOLDER/<fingerprint>/units.json     pieces of a corpus that is whole, which lie in its flat files

[Note: one piece after the other]
The pieces of a unit that are used follow each other from its first row on. Each says the rows that it covers, bad ones
included, so reading goes on with the row behind the last piece. Where several cover the same rows any of them will do.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4
from zipfile import BadZipFile

import numpy as np

from dtlayout.base import toml
from dtlayout.base.errors import DataError, InvalidConfig
from dtlayout.base.files import parse_json
from dtlayout.data.documents import Document

TOKENS_NAME = "tokens.bin"
DOCUMENTS_NAME = "documents.bin"
LOSS_MASK_NAME = "taught.bin"
INFO_NAME = "tokens.json"
UNITS_NAME = "units.json"
_DAMAGE = (BadZipFile, ValueError, EOFError, KeyError)
"""Errors of reading a file that was torn."""


@dataclass(frozen=True, kw_only=True)
class TokenPiece:
    """Documents of some rows of a unit."""

    unit: str
    """Fingerprint of the unit."""
    first_row: int
    """Number of the first row that is covered."""
    end_row: int
    """Number of the row behind the last one."""
    is_end: bool
    """Whether the unit has no more rows."""
    num_documents: int
    num_tokens: int
    has_text: bool
    """Whether there is any text or answer to learn from."""
    num_bad: int = 0
    """Rows that were left out, since they could not be read."""
    first_bad: str = ""
    """Place of the first of them, and the reason."""
    num_rewritten: int = 0
    """Answers that are no targets, since the template has rewritten them."""
    num_unanswered: int = 0
    """Conversations without a message of the assistant."""


@dataclass(frozen=True)
class PlacedPiece:
    """A piece and where its arrays lie."""

    piece: TokenPiece
    place: Path
    """An .npz file, or the folder of a corpus."""
    first_document: int
    """Documents before it there."""
    first_token: int
    """Ids before it there."""

    def read(self, dtype: "np.dtype[Any]") -> dict[str, Any]:
        """Arrays of the part: `ids`, `lengths` and, of conversations, `taught`; those of a whole corpus are mapped.

        DataError where a part is damaged.
        """
        documents = slice(self.first_document, self.first_document + self.piece.num_documents)
        tokens = slice(self.first_token, self.first_token + self.piece.num_tokens)
        if self.place.is_dir():
            offsets = np.memmap(self.place / DOCUMENTS_NAME, "<i8", "r")
            found = {
                "ids": np.memmap(self.place / TOKENS_NAME, dtype, "r")[tokens],
                "lengths": np.diff(offsets[documents.start : documents.stop + 1]),
            }
            if (self.place / LOSS_MASK_NAME).exists():
                found["taught"] = np.memmap(self.place / LOSS_MASK_NAME, "u1", "r")[tokens]
            return found
        slices = {"ids": tokens, "lengths": documents, "taught": tokens}
        return {name: array[slices[name]] for name, array in _load(self.place).items()}


@lru_cache(maxsize=1)  # a part may hold thousands of pieces, which are read one after the other
def _load(part: Path) -> dict[str, Any]:
    """The arrays of a part; DataError if it is damaged."""
    try:
        with np.load(part) as arrays:
            return {name: arrays[name] for name in ("ids", "lengths", "taught") if name in arrays}
    except _DAMAGE as error:
        raise DataError(f"{str(part)!r} is damaged ({error}); delete {str(part.parent)!r}") from error


def forget_parts() -> None:
    """Free the memory of the part that was read last."""
    _load.cache_clear()


def find_pieces(folder: Path, units: Sequence[str]) -> list[list[PlacedPiece]]:
    """For each unit its pieces below `folder`, from its first row on: [Note: one piece after the other]."""
    found: defaultdict[str, list[PlacedPiece]] = defaultdict(list)
    for each in _list_placed(folder):
        found[each.piece.unit].append(each)
    return [_chain(found.get(unit, [])) for unit in units]


def _chain(found: Sequence[PlacedPiece]) -> list[PlacedPiece]:
    """Pieces that follow each other from row 0 on, the longest first."""
    chain: list[PlacedPiece] = []
    row = 0
    by_row = sorted(found, key=lambda each: (each.piece.is_end, each.piece.end_row))
    following = {each.piece.first_row: each for each in by_row}  # of several the one that reaches furthest
    while row in following and (each := following[row]) not in chain:
        chain.append(each)
        if each.piece.is_end:
            break
        row = each.piece.end_row
    return chain


def _list_placed(folder: Path) -> Iterator[PlacedPiece]:
    for path in sorted(folder.glob("*.parts/*.npz")):
        with suppress(OSError, InvalidConfig, *_DAMAGE), np.load(path) as part:
            yield from _place(_parse(bytes(part["pieces"])), path)
    for path in sorted(folder.glob(f"*/{UNITS_NAME}")):
        if (path.parent / INFO_NAME).exists():
            with suppress(OSError, ValueError, InvalidConfig):
                yield from _place(_parse(path.read_bytes()), path.parent)


def _parse(text: bytes) -> list[TokenPiece]:
    return [toml.parse(each, TokenPiece) for each in parse_json(text)]


def _place(pieces: Iterable[TokenPiece], place: Path) -> Iterator[PlacedPiece]:
    num_documents = num_tokens = 0
    for piece in pieces:
        yield PlacedPiece(piece, place, num_documents, num_tokens)
        num_documents += piece.num_documents
        num_tokens += piece.num_tokens


def write_units(folder: Path, units: Sequence[Sequence[PlacedPiece]]) -> None:
    """Write units.json beside the flat files that hold these units, one after the other, each of them to its end."""
    pieces = []
    for chain in units:
        parts = [each.piece for each in chain]
        first_bad = next((each.first_bad for each in parts if each.num_bad), "")
        pieces.append(
            replace(
                parts[0], end_row=parts[-1].end_row, is_end=True, first_bad=first_bad,
                has_text=any(each.has_text for each in parts),
                **{name: sum(getattr(each, name) for each in parts) for name in _COUNTS},
            )
        )  # fmt: skip
    (folder / UNITS_NAME).write_text(json.dumps(list(map(asdict, pieces))) + "\n", encoding="utf-8")


_COUNTS = ("num_documents", "num_tokens", "num_bad", "num_rewritten", "num_unanswered")


class PieceWriter:
    """Gathers documents, and writes them as a part when there are enough."""

    def __init__(self, folder: Path, dtype: "np.dtype[Any]", most_tokens: int):
        """Parts go to `folder`, as soon as they have `most_tokens` ids."""
        self.folder, self.dtype, self.most_tokens = folder, dtype, most_tokens
        self._documents: list[Document] = []
        self._pieces: list[TokenPiece] = []
        self._open: TokenPiece | None = None
        self._num_tokens = 0

    def begin(self, unit: str, first_row: int) -> None:
        """Begin with a row of a unit."""
        self._open = TokenPiece(
            unit=unit, first_row=first_row, end_row=first_row, is_end=False, num_documents=0, num_tokens=0,
            has_text=False,
        )  # fmt: skip

    def add(self, document: Document, row: int) -> None:
        """Add the document of a row of the unit that was begun."""
        assert self._open is not None, "a unit was begun"
        now = self._open
        self._documents.append(document)
        self._num_tokens += document.ids.size
        self._open = replace(
            now, end_row=row + 1, num_documents=now.num_documents + 1, num_tokens=now.num_tokens + document.ids.size,
            has_text=now.has_text or document.has_text, num_rewritten=now.num_rewritten + document.num_rewritten,
            num_unanswered=now.num_unanswered + document.num_unanswered,
        )  # fmt: skip

    def end(self, num_rows: int) -> None:
        """End the unit, which has so many rows."""
        assert self._open is not None, "a unit was begun"
        self._open = replace(self._open, end_row=num_rows, is_end=True)

    def close_piece(self, bad: Sequence[tuple[int, str]]) -> None:
        """Close the piece of the unit; `bad` are the numbers of all its bad rows so far, and the reasons."""
        if (piece := self._open) is None:
            return
        inside = [why for row, why in bad if piece.first_row <= row < piece.end_row]
        self._pieces.append(replace(piece, num_bad=len(inside), first_bad=(inside or [""])[0]))
        self._open = None

    @property
    def is_full(self) -> bool:
        """Whether the documents are enough for a part."""
        return self._num_tokens >= self.most_tokens

    def flush(self) -> None:
        """Write all closed pieces as a part; nothing where there is none."""
        assert self._open is None, "pieces are closed before they are written"
        if not self._pieces:
            return
        documents, pieces = self._documents, self._pieces
        self._documents, self._pieces, self._num_tokens = [], [], 0
        arrays = {
            "ids": np.concatenate([np.zeros(0, np.int64), *(each.ids for each in documents)]).astype(self.dtype),
            "lengths": np.array([document.ids.size for document in documents], dtype="<i8"),
            "pieces": np.frombuffer(json.dumps(list(map(asdict, pieces))).encode(), np.uint8),
        }
        if documents and documents[0].loss_mask is not None:
            arrays["taught"] = np.concatenate([each.loss_mask for each in documents if each.loss_mask is not None])
        number = len(list(self.folder.glob("*.npz")))
        path = self.folder / f"{number:06}-{uuid4().hex[:8]}.npz"  # another process may write the same rows
        own = path.with_suffix(".partial")
        try:
            with own.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())  # the rename must not reach the disk before the bytes
            own.replace(path)
        finally:
            own.unlink(missing_ok=True)
