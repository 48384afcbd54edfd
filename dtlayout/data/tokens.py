"""Prepared tokens, mapped from disk."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtlayout.base.errors import DataError
from dtlayout.base.files import hash_file, parse_json
from dtlayout.data.prepare import DOCUMENTS_NAME, HASH_KEYS, INFO_NAME, LOSS_MASK_NAME, TOKENS_NAME


@dataclass(frozen=True, eq=False)
class TokenFile:
    """Prepared tokens, mapped and not read: opening costs nothing, whatever the size."""

    tokens: "np.memmap[Any, np.dtype[Any]]"
    """All ids in one row, uint16 or uint32, read-only."""
    documents: "np.memmap[Any, np.dtype[np.int64]]"
    """Offset of each document, and the end of the last one."""
    loss_mask: "np.memmap[Any, np.dtype[np.uint8]] | None"
    """For each id of conversations, 1 if it counts as a target; None where all ids do."""
    vocab_size: int
    """Size of the tokenizer's vocabulary: every id is below it."""
    end_of_document: int
    """The id between documents."""
    sha256: str
    """Hash of the file of ids; for conversations that an older version prepared, of ids and loss mask together."""
    documents_sha256: str = ""
    """Hash of the file of document offsets; empty where an older version prepared them."""
    taught_sha256: str = ""
    """Hash of the loss mask's file, under the name of its key on disk; empty without one, or from an older version."""
    num_rewritten: int = 0
    """Answers that are no targets, since the chat template writes them in another way once messages follow."""
    num_unanswered: int = 0
    """Conversations without a message of the assistant; 0 where all of a text is learnt."""
    loss_on: str = ""
    """`data.loss_on` with which conversations were prepared; empty for text."""
    num_bad_rows: int = 0
    """Rows that were left out, since they could not be read or lacked a field."""
    first_bad_row: str = ""
    """Place of the first of them, and the reason."""
    max_tokens: int = 0
    """`data.max_tokens` with which they were prepared; 0 where all of the source was taken."""

    @classmethod
    def open(cls, folder: str | Path) -> "TokenFile":
        """The tokens that `prepare_tokens` left in `folder`."""
        folder = Path(folder)
        info = _read_info(folder / INFO_NAME)
        loss_mask = None
        if (folder / LOSS_MASK_NAME).exists():
            loss_mask = _map(folder / LOSS_MASK_NAME, "<u1", info["num_tokens"])
        return cls(
            _map(folder / TOKENS_NAME, np.dtype(info["dtype"]).newbyteorder("<"), info["num_tokens"]),
            _map(folder / DOCUMENTS_NAME, "<i8", info["num_documents"] + 1),
            loss_mask,
            info["vocab_size"],
            info["end_of_document"],
            **{key: info.get(key, "") for key in HASH_KEYS.values()},
            num_rewritten=info.get("num_rewritten", 0),
            num_unanswered=info.get("num_unanswered", 0),
            loss_on=info.get("loss_on", ""),
            num_bad_rows=info.get("num_bad_rows", 0),
            first_bad_row=info.get("first_bad_row", ""),
            max_tokens=info.get("max_tokens", 0),
        )

    @property
    def folder(self) -> Path:
        """Folder of the files."""
        return Path(str(self.tokens.filename)).parent

    @property
    def num_tokens(self) -> int:
        """Number of ids in the file, ends of documents included."""
        return int(self.tokens.size)

    @property
    def num_documents(self) -> int:
        """Number of documents, the empty ones included."""
        return int(self.documents.size) - 1

    @property
    def fingerprint(self) -> str:
        """A text that is equal for two folders only if their ids and targets are the same.

        A checkpoint keeps it, so that a run that resumes on other data can say so.
        """
        return f"{self.sha256} {self.taught_sha256}".rstrip()

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse a model whose embedding is too small for these ids; a larger (padded) one is fine."""
        refuse_larger(self.vocab_size, vocab_size)

    def check_ids(self, ids: "np.ndarray[Any, Any]", positions: "np.ndarray[Any, Any]") -> None:
        """Raise DataError if an id that was read at one of these positions of the file is none of the tokenizer's.

        An embedding that is split over ranks would take the id for another rank's, and train on nothing.
        """
        if ids.size and ids.max() >= self.vocab_size:
            first = int(ids.argmax())
            raise DataError(
                f"{str(self.folder / TOKENS_NAME)!r} holds id {ids.flat[first]} at position {positions.flat[first]}, "
                f"the tokenizer has {self.vocab_size}: the file is damaged; "
                f"delete {str(self.folder)!r} and prepare again"
            )

    def verify(self) -> int:
        """Read all files; DataError if they are not the ones that were prepared. Returns how many were compared."""
        if self.loss_mask is not None and not self.taught_sha256:
            raise DataError(
                f"{str(self.folder)!r} cannot be compared: an older version prepared it, whose one checksum was of ids "
                f"and targets together; delete that folder and prepare again, or go on with it unverified"
            )
        written = {name: getattr(self, key) for name, key in HASH_KEYS.items()}
        wrong = [name for name, sha256 in written.items() if sha256 and hash_file(self.folder / name) != sha256]
        if wrong:
            raise DataError(
                f"{str(self.folder)!r} is damaged: its files are not those that {INFO_NAME} has the checksum of: "
                f"{', '.join(wrong)}; delete that folder and prepare again"
            )
        return sum(map(bool, written.values()))


def refuse_larger(num_ids: int, vocab_size: int) -> None:
    """Raise DataError if a tokenizer has more ids than a model's embedding has rows."""
    if num_ids > vocab_size:
        raise DataError(
            f"the tokenizer has {num_ids} ids, the model's vocab_size={vocab_size}; "
            f"use a model with vocab_size >= {num_ids} or another tokenizer"
        )


def _map(path: Path, dtype: npt.DTypeLike, size: int) -> "np.memmap[Any, Any]":
    """Map a file of `size` numbers; DataError if it has another size."""
    expected_bytes = size * np.dtype(dtype).itemsize
    found_bytes = path.stat().st_size if path.is_file() else 0
    if found_bytes != expected_bytes:
        raise DataError(
            f"{str(path)!r} has {found_bytes} bytes where {INFO_NAME} promises {size} numbers of "
            f"{np.dtype(dtype).itemsize} = {expected_bytes} bytes; delete {str(path.parent)!r} and prepare again"
        )
    return np.memmap(path, dtype=dtype, mode="r", shape=(size,))


def _read_info(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(
            f"there are no prepared tokens in {str(path.parent)!r}: {path.name} is missing; prepare it first"
        )
    needed = {"dtype", "num_tokens", "num_documents", "vocab_size", "end_of_document", "sha256"}
    try:
        info = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{str(path)!r} is not JSON ({error}); delete that folder and prepare again") from error
    if not isinstance(info, dict) or needed - info.keys() or info["dtype"] not in ("uint16", "uint32"):
        raise DataError(
            f"{str(path)!r} does not describe tokens: it needs {', '.join(sorted(needed))} and a dtype of uint16 or "
            "uint32; delete that folder and prepare again"
        )
    return info
