"""Read training samples out of prepared tokens, in an order that needs no state.

Vocabulary: sample i of sequence length S covers tokens [i S, i S + S + 1): S inputs and, shifted by one, S targets.
An epoch is one pass over all samples in an order of its own.

[Note: the order of samples]
Which sample stands at `index` of the global batch of `step` is a function of (seed, step, index) alone:

    k = step * global_batch + index,   epoch = k // num_samples,   sample = permute(k % num_samples; seed, epoch)

so a run resumes at any step without a saved iterator, and every layout trains on the same batches. `permute` is in
`dtlayout.data.permutation`. An epoch may end inside a batch; the next one starts at once and nothing is dropped.

[Note: contiguous parts]
Data-parallel rank r reads the r-th of equal contiguous parts of the global batch, as if its dim 0 were sharded, and
cuts it in order into microbatches. The ranks of one pipeline, tensor or context group share a data-parallel rank and
therefore read the same samples.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dtlayout.batch import Batch
from dtlayout.data.permutation import hash_integers, permute
from dtlayout.data.prepare import INFO_NAME, TOKENS_NAME
from dtlayout.errors import DataError

if TYPE_CHECKING:
    import torch


def open_samples(folder: Path, vocab_size: int, batch: Batch, *, seed: int) -> "Samples":
    """The samples of a run, from the tokens that `prepare_tokens` left in `folder`.

    DataError if the tokens do not fit the model's vocabulary or hold less than one sample.
    """
    tokens = TokenFile.open(folder)
    tokens.check_vocab(vocab_size)
    return Samples(tokens, batch, seed)


@dataclass(frozen=True, eq=False)
class TokenFile:
    """Prepared tokens, mapped and not read: opening costs nothing, whatever the size."""

    tokens: "np.memmap[Any, np.dtype[Any]]"
    """All ids in one row, uint16 or uint32, read-only."""
    vocab_size: int
    """The tokenizer's: every id is below it."""
    end_of_document: int
    """The id between documents."""
    sha256: str
    """Hash of the ids: a checkpoint keeps it, so that a run that resumes on other data can say so."""

    @classmethod
    def open(cls, folder: str | Path) -> "TokenFile":
        """The tokens that `prepare_tokens` left in `folder`."""
        info = _read_info(Path(folder) / INFO_NAME)
        path = Path(folder) / TOKENS_NAME
        dtype = np.dtype(info["dtype"]).newbyteorder("<")
        expected_bytes = info["num_tokens"] * dtype.itemsize
        found_bytes = path.stat().st_size if path.is_file() else 0
        if found_bytes != expected_bytes:
            raise DataError(
                f"{str(path)!r} has {found_bytes} bytes where {INFO_NAME} promises {info['num_tokens']} tokens of "
                f"{dtype.itemsize} = {expected_bytes} bytes; delete {str(folder)!r} and prepare again"
            )
        tokens = np.memmap(path, dtype=dtype, mode="r", shape=(info["num_tokens"],))
        return cls(tokens, info["vocab_size"], info["end_of_document"], info["sha256"])

    @property
    def folder(self) -> Path:
        """Where the file lies."""
        return Path(str(self.tokens.filename)).parent

    @property
    def num_tokens(self) -> int:
        """Ids in the file, ends of documents included."""
        return int(self.tokens.size)

    def num_samples(self, seq_len: int) -> int:
        """Samples of `seq_len` tokens; the last token of one is the first of the next, so one token is left over."""
        return max(self.num_tokens - 1, 0) // seq_len

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse a model whose embedding is too small for these ids; a larger (padded) one is fine."""
        if self.vocab_size > vocab_size:
            raise DataError(
                f"the tokenizer has {self.vocab_size} ids, the model's vocab_size={vocab_size}; "
                f"use a model with vocab_size >= {self.vocab_size} or another tokenizer"
            )


@dataclass(frozen=True, eq=False)
class Samples:
    """The batches of a run: `tokens` cut into samples of `sizes.seq_len`, `sizes.global_batch` of them a step."""

    tokens: TokenFile
    sizes: Batch
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError(
                f"the data holds {self.tokens.num_tokens} tokens, one sample of seq_len={self.sizes.seq_len} needs "
                f"{self.sizes.seq_len + 1}; use a longer source or a seq_len of at most {self.tokens.num_tokens - 1}"
            )

    @property
    def num_samples(self) -> int:
        """Samples in one epoch."""
        return self.tokens.num_samples(self.sizes.seq_len)

    @property
    def num_batches(self) -> int:
        """Whole global batches in one epoch."""
        return self.num_samples // self.sizes.global_batch

    def batch(self, step: int, indices: Sequence[int]) -> "tuple[torch.Tensor, torch.Tensor]":
        """(tokens_BS, targets_BS), int64, for these indices of the global batch of `step`."""
        import torch

        seq_len = self.sizes.seq_len
        ids_B = sample_ids(step, indices, self.sizes.global_batch, self.num_samples, self.seed)
        window_BS = ids_B[:, None] * seq_len + np.arange(seq_len + 1)
        rows = torch.from_numpy(self.tokens.tokens[window_BS].astype(np.int64))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def sample_ids(
    step: int, indices: Sequence[int], global_batch: int, num_samples: int, seed: int
) -> npt.NDArray[np.int64]:
    """Which sample stands at each of `indices` in the global batch of `step`: [Note: the order of samples]."""
    index = np.asarray(indices, dtype=np.int64).reshape(-1)
    if step < 0:
        raise DataError(f"step={step} is negative; steps count from 0")
    outside = index[(index < 0) | (index >= global_batch)]
    if outside.size:
        raise DataError(f"index {outside[0]} is outside the global batch; use 0 to {global_batch - 1}")
    epochs, places = np.divmod(step * global_batch + index, num_samples)
    ids = np.empty_like(places)
    for epoch in np.unique(epochs):  # one, or two where an epoch ends inside the batch
        ids[epochs == epoch] = permute(places[epochs == epoch], num_samples, hash_integers(seed, int(epoch)))
    return ids


def own_indices(global_batch: int, dp_rank: int, num_dp_ranks: int) -> range:
    """What a data-parallel rank reads of each global batch, which they share equally: [Note: contiguous parts].

    >>> own_indices(8, 1, 2)
    range(4, 8)
    """
    num_own, rest = divmod(global_batch, num_dp_ranks)
    assert not rest, "Layout.check has refused a batch that the ranks do not share equally"
    return range(dp_rank * num_own, (dp_rank + 1) * num_own)


def find_starts(tokens_BS: "torch.Tensor", end_of_document: int) -> "torch.Tensor":
    """For each token the position at which its document starts, [B, S] int32; the first one of a sample starts at 0.

    An end-of-document token belongs to the document that it ends.

    >>> import torch
    >>> find_starts(torch.tensor([[7, 0, 5, 6, 0]]), end_of_document=0)
    tensor([[0, 0, 2, 2, 2]], dtype=torch.int32)
    """
    import torch

    is_first_BS = torch.zeros_like(tokens_BS, dtype=torch.bool)
    is_first_BS[:, 1:] = tokens_BS[:, :-1] == end_of_document
    positions_S = torch.arange(tokens_BS.shape[1], dtype=torch.int32, device=tokens_BS.device)
    return (is_first_BS * positions_S).cummax(dim=1).values


def _read_info(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(
            f"there are no prepared tokens in {str(path.parent)!r}: {path.name} is missing; prepare it first"
        )
    needed = {"dtype", "num_tokens", "num_documents", "vocab_size", "end_of_document", "sha256"}
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{str(path)!r} is not JSON ({error}); delete that folder and prepare again") from error
    if not isinstance(info, dict) or needed - info.keys() or info["dtype"] not in ("uint16", "uint32"):
        raise DataError(
            f"{str(path)!r} does not describe tokens: it needs {', '.join(sorted(needed))} and a dtype of uint16 or "
            "uint32; delete that folder and prepare again"
        )
    return info
