"""Read training samples out of prepared tokens, in an order that needs no state.

Vocabulary: a sample of sequence length S is S inputs and, shifted by one, S targets. Packed, sample i of a source
covers its tokens [i S, i S + S + 1), whatever documents these are of; padded, it is document i, cut after S + 1 tokens
or filled up with what is no target. An epoch of a source is one pass over all its samples in an order of its own.

[Note: the order of samples]
Which sample stands at `index` of a global batch is a function of (seed, samples of all batches before, index) alone:

    k = seen + index                                    seen = step * global_batch where all batches are of one size
    source, n = deal(k)                                               n = k where there is one source alone
    epoch = n // num_samples,   sample = permute(n % num_samples; seed, epoch)          num_samples are the source's

so a run resumes at any step from one saved number, with global batches of another size too, and every layout trains on
the same batches. `permute` is in `dtlayout.data.permutation`. An epoch may end inside a batch; the next one starts at
once and nothing is dropped.

[Note: shares]
Several sources share rounds of `ROUND` samples by their weights: q_s of a round are of source s, at places that another
permutation gives each round. Place p of round r, counted among the q_s of its source, is that source's number
n = r q_s + p. So in each round all shares are exact, and the n of a source take all values, each once.

[Note: contiguous parts]
Data-parallel rank r reads the r-th of equal contiguous parts of the global batch, as if its dim 0 were sharded, and
cuts it in order into microbatches. The ranks of one pipeline, tensor or context group share a data-parallel rank and
therefore read the same samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from dtlayout.base.errors import DataError
from dtlayout.base.formatting import plural
from dtlayout.config.sections import DataConfig
from dtlayout.data.permutation import hash_integers, permute
from dtlayout.data.tokens import TokenFile
from dtlayout.spec.batch import IGNORED, Batch

if TYPE_CHECKING:
    import torch

ROUND = 10_000
"""Samples over which shares are exact: a weight counts to a hundredth of a percent."""

_SAMPLES_AT_ONCE = 1 << 12

Ints = npt.NDArray[np.int64]


class SampleRows(NamedTuple):
    """Samples of a batch, [B, S] each."""

    tokens: "torch.Tensor"
    """int64."""
    targets: "torch.Tensor"
    """int64, `IGNORED` where none counts."""
    is_last: "torch.Tensor"
    """bool: whether a token is the last of its document."""


@dataclass(frozen=True)
class Seen:
    """What the steps before a step have seen, of whatever sizes their batches were."""

    step: int = 0
    """How many steps those are."""
    samples: int = 0
    """All samples of their global batches."""
    tokens: int = 0
    """The inputs of these."""

    def after(self, step: int, batch: Batch) -> "Seen":
        """What `step` steps have seen, if all since then are of this batch."""
        samples = self.count_samples(step, batch.global_batch)
        return Seen(step, samples, self.tokens + (step - self.step) * batch.num_tokens)

    def count_samples(self, step: int, global_batch: int) -> int:
        """Samples before `step`, if all batches since then are of this size; DataError for a step before."""
        if step < 0:
            raise DataError(f"step={step} is negative; steps count from 0")
        if step < self.step:
            raise DataError(f"step={step} is before step {self.step}, from which on samples are counted")
        return self.samples + (step - self.step) * global_batch


_NOTHING = Seen()


def open_samples(data: DataConfig, folders: Sequence[Path], vocab_size: int, batch: Batch, *, seed: int) -> "Samples":
    """The samples of a run, from what `prepare_tokens` left in a folder for each of `data.sources`.

    DataError if tokens do not fit the model's vocabulary or a source holds less than one sample.
    """
    cuts = []
    for folder, each in zip(folders, data.sources, strict=True):
        tokens = TokenFile.open(folder)
        tokens.check_vocab(vocab_size)
        cuts.append(SampledSource(tokens, batch.seq_len, str(each.source), is_padded=data.samples == "padded"))
    return Samples(tuple(cuts), batch, seed, data.weights)


def check_held_out(samples: "Samples", source: str) -> None:
    """DataError if the samples of [validation] do not make one batch."""
    if samples.num_batches == 0:
        raise DataError(
            f"validation.source={source!r} holds {plural(samples.num_samples, 'sample')} of "
            f"seq_len={samples.sizes.seq_len}, fewer than batch.global_batch={samples.sizes.global_batch}; "
            f"use a longer source"
        )


@dataclass(frozen=True, eq=False)
class SampledSource:
    """Prepared tokens of one source, cut into samples of `seq_len`."""

    tokens: TokenFile
    seq_len: int
    source: str = "the data"
    """What refusals call it."""
    is_padded: bool = False

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError(
                f"{self.source} holds {plural(self.tokens.num_tokens, 'token')}, one sample of seq_len={self.seq_len} "
                f"needs {self.seq_len + 1}; use a longer source or a seq_len of at most {self.tokens.num_tokens - 1}"
            )

    @property
    def num_samples(self) -> int:
        """Samples in one epoch; of packed ones the last token of one is the first of the next, and one is left over."""
        return self.tokens.num_documents if self.is_padded else max(self.tokens.num_tokens - 1, 0) // self.seq_len

    @property
    def num_cut(self) -> int:
        """Documents that a padded sample does not hold whole."""
        return int((np.diff(self.tokens.documents) > self.seq_len + 1).sum()) if self.is_padded else 0

    def count_untaught(self) -> int:
        """Samples without any target; all that says what is taught is read for it."""
        num_untaught = 0
        for start in range(0, self.num_samples, _SAMPLES_AT_ONCE):
            first_B, length_B = self._find(np.arange(start, min(start + _SAMPLES_AT_ONCE, self.num_samples)))
            if self.tokens.taught is None:
                num_untaught += int((length_B < 2).sum())
            else:  # the first token of a sample is no target
                begin, end = first_B[0], first_B[-1] + length_B[-1]
                targets = begin + np.flatnonzero(self.tokens.taught[begin:end])
                nth = np.searchsorted(targets, (first_B + 1, first_B + length_B))
                num_untaught += int((nth[0] == nth[1]).sum())
        return num_untaught

    def read_ids(self, sample: int) -> Ints:
        """The tokens of one sample, without what fills it up."""
        tokens_BS, _, _ = self.read(np.array([sample]))
        documents = self.tokens.documents
        return tokens_BS[0, : documents[sample + 1] - documents[sample]] if self.is_padded else tokens_BS[0]

    def read(self, ids_B: Ints) -> tuple[Ints, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """S + 1 tokens of each sample; which count as targets; which are the last of their document."""
        whole = self.seq_len + 1
        first_B, length_B = self._find(ids_B)
        window_BS = np.minimum(first_B[:, None] + np.arange(whole), self.tokens.num_tokens - 1)
        is_there_BS = np.arange(whole) < length_B[:, None]
        tokens_BS = np.where(is_there_BS, self.tokens.tokens[window_BS], self.tokens.end_of_document).astype(np.int64)
        self.tokens.check_ids(tokens_BS, window_BS)
        is_last_BS = np.zeros_like(is_there_BS)
        for row, (first, length) in enumerate(zip(first_B, length_B, strict=True)):
            following = slice(*np.searchsorted(self.tokens.documents, (first, first + length), side="right"))
            is_last_BS[row, self.tokens.documents[following] - first - 1] = True
        if self.tokens.taught is not None:
            is_there_BS &= self.tokens.taught[window_BS] != 0
        return tokens_BS, is_there_BS, is_last_BS

    def _find(self, ids_B: Ints) -> tuple[Ints, Ints]:
        """Where each sample begins in the file, and of how many tokens it is, the one after its last input included."""
        whole = self.seq_len + 1
        if not self.is_padded:
            return ids_B * self.seq_len, np.full_like(ids_B, whole)
        first_B = self.tokens.documents[ids_B]
        return first_B, np.minimum(self.tokens.documents[ids_B + 1] - first_B, whole)


@dataclass(frozen=True, eq=False)
class Samples:
    """The batches of a run, `sizes.global_batch` samples a step."""

    cuts: tuple[SampledSource, ...]
    """One for each source."""
    sizes: Batch
    seed: int
    weights: tuple[float, ...] = (1.0,)
    """Of each source: [Note: shares]."""
    seen: Seen = _NOTHING
    """What steps have seen that batches of another size may have had; those from there on have `sizes`."""

    def __post_init__(self) -> None:
        if 0 in self._quotas:
            lost = self.cuts[self._quotas.index(0)]
            raise DataError(f"the weight of {lost.source} is less than 1 / {ROUND} of all; raise it or leave it out")

    @cached_property
    def _quotas(self) -> list[int]:
        """Samples of each source in a round; the largest remainders are rounded up."""
        shares = np.array(self.weights) / sum(self.weights) * ROUND
        quotas = np.floor(shares).astype(np.int64)
        quotas[np.argsort(quotas - shares, kind="stable")[: ROUND - quotas.sum()]] += 1
        return [int(quota) for quota in quotas]

    @property
    def shares(self) -> list[float]:
        """Of each source, of the samples that are read: [Note: shares]."""
        return [quota / ROUND for quota in self._quotas]

    @property
    def num_samples(self) -> int:
        """Samples of all sources."""
        return sum(cut.num_samples for cut in self.cuts)

    @property
    def num_batches(self) -> int:
        """Whole global batches in so many."""
        return self.num_samples // self.sizes.global_batch

    @property
    def fingerprint(self) -> str:
        """Equal for other samples only if these are the same ones in the same order, whatever the seed."""
        hashes = [cut.tokens.fingerprint for cut in self.cuts]
        if len(self.cuts) > 1:
            hashes = [f"{quota} {found}" for quota, found in zip(self._quotas, hashes, strict=True)]
        return ", ".join([*hashes, *(["padded"] if self.cuts[0].is_padded else [])])

    def locate(self, step: int, indices: Sequence[int]) -> tuple[Ints, Ints]:
        """Of the samples at these indices of the global batch of `step`: which source each is of, and which there."""
        numbers = number_samples(step, indices, self.sizes.global_batch, self.seen)
        source_B, sample_B = deal(numbers, self._quotas, self.seed)
        for i, cut in enumerate(self.cuts):
            is_here = source_B == i
            sample_B[is_here] = shuffle(sample_B[is_here], cut.num_samples, self.seed)
        return source_B, sample_B

    def batch(self, step: int, indices: Sequence[int]) -> SampleRows:
        """The samples at these indices of the global batch of `step`, [B, S] each."""
        import torch

        source_B, sample_B = self.locate(step, indices)
        shape = (len(source_B), self.sizes.seq_len + 1)
        tokens, counts, is_last = np.empty(shape, np.int64), np.empty(shape, np.bool_), np.empty(shape, np.bool_)
        for i, cut in enumerate(self.cuts):
            is_here = source_B == i
            tokens[is_here], counts[is_here], is_last[is_here] = cut.read(sample_B[is_here])
        targets = np.where(counts, tokens, IGNORED)[:, 1:]
        return SampleRows(
            *(torch.from_numpy(np.ascontiguousarray(each)) for each in (tokens[:, :-1], targets, is_last[:, :-1]))
        )


def number_samples(step: int, indices: Sequence[int], global_batch: int, seen: Seen = _NOTHING) -> Ints:
    """k of each of `indices` in the global batch of `step`: [Note: the order of samples]."""
    index = np.asarray(indices, dtype=np.int64).reshape(-1)
    outside = index[(index < 0) | (index >= global_batch)]
    if outside.size:
        raise DataError(f"index {outside[0]} is outside the global batch; use 0 to {global_batch - 1}")
    return seen.count_samples(step, global_batch) + index


def deal(numbers: Ints, quotas: Sequence[int], seed: int) -> tuple[Ints, Ints]:
    """The source of each sample and its number there: [Note: shares]."""
    if len(quotas) == 1:
        return np.zeros_like(numbers), numbers
    rounds, places = np.divmod(numbers, ROUND)
    for each in np.unique(rounds):  # one, or two where a round ends inside the batch
        here = rounds == each
        places[here] = permute(places[here], ROUND, hash_integers(seed, int(each), ROUND))
    firsts = np.cumsum([0, *quotas])
    source = np.searchsorted(firsts, places, side="right") - 1
    return source, rounds * np.asarray(quotas)[source] + places - firsts[source]


def shuffle(numbers: Ints, num_samples: int, seed: int) -> Ints:
    """Which of a source's samples each of its numbers is: [Note: the order of samples]."""
    epochs, places = np.divmod(numbers, num_samples)
    for epoch in np.unique(epochs):  # one, or two where an epoch ends inside the batch
        places[epochs == epoch] = permute(places[epochs == epoch], num_samples, hash_integers(seed, int(epoch)))
    return places


def own_indices(global_batch: int, dp_rank: int, num_dp_ranks: int) -> range:
    """What a data-parallel rank reads of each global batch, which they share equally: [Note: contiguous parts].

    >>> own_indices(8, 1, 2)
    range(4, 8)
    """
    num_own, rest = divmod(global_batch, num_dp_ranks)
    assert not rest, "Layout.check has refused a batch that the ranks do not share equally"
    return range(dp_rank * num_own, (dp_rank + 1) * num_own)


def find_starts(is_last_BS: "torch.Tensor") -> "torch.Tensor":
    """For each token the position at which its document starts, [B, S] int32; the first one of a sample starts at 0.

    `is_last_BS` says which token is the last of its document.

    >>> import torch
    >>> find_starts(torch.tensor([[7, 0, 5, 6, 0]]) == 0)
    tensor([[0, 0, 2, 2, 2]], dtype=torch.int32)
    """
    import torch

    is_first_BS = torch.zeros_like(is_last_BS)
    is_first_BS[:, 1:] = is_last_BS[:, :-1]
    positions_S = torch.arange(is_last_BS.shape[1], dtype=torch.int32, device=is_last_BS.device)
    return (is_first_BS * positions_S).cummax(dim=1).values
