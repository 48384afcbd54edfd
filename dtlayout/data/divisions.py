"""Divisions: the three ways in which the documents of a source become samples.

Vocabulary: a sample of sequence length S has room for S + 1 tokens, which are S inputs and, shifted by one, S targets.
A passage is a run of a source's tokens that lies in one sample. Room that passages leave is padding.

- packed: the documents, one after the other, are one row. Sample i is one passage, its tokens [i S, i S + S + 1).
- padded: sample i is document i, cut after S + 1 tokens.
- best-fit: whole documents fill each sample (`dtlayout.data.best_fit`). Only a document longer than a sample is cut.

The first token of a passage is no target: nothing before it belongs to the same text, and a packed sample's first token
is the last target of the sample before.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dtlayout.data.best_fit import Ints, Packing, open_packing
from dtlayout.data.tokens import TokenFile

_DOCUMENTS_AT_ONCE = 1 << 20


class Passages(NamedTuple):
    """Passages of some samples, in the order of the samples, [N] each."""

    rows: Ints
    """Index of the passage's sample among those that were asked for."""
    firsts: Ints
    """Offset of the passage in the file of tokens."""
    lengths: Ints
    """Number of its tokens, at least 1."""


@dataclass(frozen=True, eq=False)
class Division(ABC):
    """The samples of one source."""

    tokens: TokenFile
    seq_len: int
    keeps_rest: bool = True
    """Whether the rest of a document that is cut becomes passages too. In a conversation it would lack its prompt."""

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Samples in one epoch."""

    @property
    @abstractmethod
    def num_cut(self) -> int:
        """Documents with tokens in the samples of which none holds all: longer than a sample, or cut at its end."""

    @property
    @abstractmethod
    def padding_share(self) -> float:
        """Share of the samples' room that no passage fills."""

    @property
    def num_left_out(self) -> int:
        """Tokens behind the last sample, left out of each epoch because they fill none; 0 where documents are whole."""
        return 0

    @abstractmethod
    def find(self, ids_B: Ints) -> Passages:
        """The passages of these samples."""


class PackedDivision(Division):
    """One row of all documents, cut into samples."""

    @property
    def num_samples(self) -> int:
        """Samples in one epoch.

        The last token of a packed sample is the first one of the next, and the last of all has none after it.
        """
        return max(self.tokens.num_tokens - 1, 0) // self.seq_len

    @cached_property
    def num_cut(self) -> int:
        """Documents in which a sample ends. One that ends with a sample's last target is whole."""
        documents, num_cut = self.tokens.documents, 0
        for start in range(0, documents.size - 1, _DOCUMENTS_AT_ONCE):
            bounds = np.asarray(documents[start : start + _DOCUMENTS_AT_ONCE + 1])
            firsts, ends = bounds[:-1], bounds[1:]
            sample = np.minimum(firsts // self.seq_len, self.num_samples - 1)
            is_read = firsts <= self.num_samples * self.seq_len
            num_cut += int((is_read & (ends > (sample + 1) * self.seq_len + 1)).sum())
        return num_cut

    @property
    def num_left_out(self) -> int:
        """Tokens behind the last sample, fewer than fill one."""
        return self.tokens.num_tokens - self.num_samples * self.seq_len - 1

    @property
    def padding_share(self) -> float:
        """Always 0."""
        return 0.0

    def find(self, ids_B: Ints) -> Passages:
        """One passage for each sample."""
        return Passages(np.arange(ids_B.size), ids_B * self.seq_len, np.full(ids_B.size, self.seq_len + 1))


class PaddedDivision(Division):
    """A sample for each document."""

    @property
    def num_samples(self) -> int:
        """Samples in one epoch, one for each document."""
        return self.tokens.num_documents

    @property
    def num_cut(self) -> int:
        """Documents longer than a sample, whose rest is left out."""
        return self._totals[0]

    @property
    def padding_share(self) -> float:
        """Share of the samples' room that no document fills."""
        return 1 - self._totals[1] / (self.num_samples * (self.seq_len + 1))

    @cached_property
    def _totals(self) -> tuple[int, int]:
        """Documents that are cut, and tokens in samples."""
        documents, num_cut, num_tokens = self.tokens.documents, 0, 0
        for start in range(0, documents.size - 1, _DOCUMENTS_AT_ONCE):
            lengths = np.diff(documents[start : start + _DOCUMENTS_AT_ONCE + 1])
            num_cut += int((lengths > self.seq_len + 1).sum())
            num_tokens += int(np.minimum(lengths, self.seq_len + 1).sum())
        return num_cut, num_tokens

    def find(self, ids_B: Ints) -> Passages:
        """One passage for each sample."""
        first_B = np.asarray(self.tokens.documents[ids_B])
        length_B = np.minimum(self.tokens.documents[ids_B + 1] - first_B, self.seq_len + 1)
        return Passages(np.arange(ids_B.size), first_B, length_B)


class BestFitDivision(Division):
    """Samples that whole documents fill."""

    @cached_property
    def _packing(self) -> Packing:
        return open_packing(self.tokens.folder, self.tokens.documents, self.seq_len, keeps_rest=self.keeps_rest)

    @property
    def num_samples(self) -> int:
        """Samples in one epoch."""
        return self._packing.num_samples

    @property
    def num_cut(self) -> int:
        """Documents longer than a sample."""
        return self._packing.num_cut

    @property
    def padding_share(self) -> float:
        """Share of the samples' room that no document fills."""
        return 1 - self._packing.num_tokens / (self.num_samples * (self.seq_len + 1))

    def find(self, ids_B: Ints) -> Passages:
        """The passages of each sample, in the order of the source."""
        begin_B, end_B = (np.asarray(self._packing.offsets[ids_B + i]) for i in range(2))
        row_N = np.repeat(np.arange(ids_B.size), end_B - begin_B)
        within_N = np.arange(row_N.size) - np.searchsorted(row_N, row_N)
        first_N = np.asarray(self._packing.firsts[begin_B[row_N] + within_N])
        end_N = self.tokens.documents[np.searchsorted(self.tokens.documents, first_N, side="right")]
        return Passages(row_N, first_N, np.minimum(end_N - first_N, self.seq_len + 1))


DIVISIONS: dict[str, type[Division]] = {
    "packed": PackedDivision,
    "padded": PaddedDivision,
    "best-fit": BestFitDivision,
}
"""`data.samples` → division."""
