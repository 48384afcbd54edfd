"""Training samples from prepared tokens, in an order that needs no state.

Vocabulary: a sample of sequence length S is S inputs and, shifted by one, S targets. How documents become samples is in
`dtlayout.data.divisions`; room that they leave is filled up with tokens that are no targets. An epoch of a source is
one pass over all its samples in an order of its own.

[Note: the order of samples]
The sample at `index` of a global batch is a function of (seed, number of samples in all earlier batches, index) alone:

    k = seen + index                                    seen = step * global_batch where all batches are of one size
    source, n = deal(k)                                               n = k where there is one source alone
    epoch = n // num_samples,   sample = permute(n % num_samples; seed, epoch)          num_samples are the source's

So a run resumes at any step from one saved number, with global batches of another size too, and every layout trains on
the same batches. `permute` is in `dtlayout.data.permutation`. An epoch may end inside a batch; the next one starts at
once and nothing is dropped.

[Note: shares]
Several sources share rounds of `ROUND` samples by their weights. In each round q_s samples come from source s, at
places that another permutation gives each round. Place p of round r, counted among the q_s places of its source, holds
that source's number n = r q_s + p. So all shares are exact in each round, and the numbers n of a source take all
values, each once.

[Note: contiguous parts]
The global batch is cut into equal contiguous parts, as if its dim 0 were sharded. Data-parallel rank r reads the r-th
part, and cuts it in order into microbatches. The ranks of one pipeline, tensor or context group share a data-parallel
rank and therefore read the same samples.
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
from dtlayout.data.best_fit import Ints
from dtlayout.data.divisions import DIVISIONS, Division
from dtlayout.data.permutation import hash_integers, permute
from dtlayout.data.targets import Targets, count_all_targets, explain_untaught, has_targets
from dtlayout.data.tokens import TokenFile
from dtlayout.spec.batch import IGNORED, Batch, RampStage, count_after, size_after

if TYPE_CHECKING:
    import torch

ROUND = 10_000
"""Samples over which shares are exact: a weight counts to a hundredth of a percent."""


class SampleRows(NamedTuple):
    """Samples of a batch, [B, S] each."""

    tokens: "torch.Tensor"
    """Input ids, int64."""
    targets: "torch.Tensor"
    """Target ids, int64; `IGNORED` where no target counts."""
    is_last: "torch.Tensor"
    """Whether a token is the last of its document, bool."""


@dataclass(frozen=True)
class Seen:
    """Numbers of steps, samples and tokens before a step, whatever sizes the batches had."""

    step: int = 0
    """Number of those steps."""
    samples: int = 0
    """Samples in all their global batches."""
    tokens: int = 0
    """Input tokens of those samples."""
    last_size: int = 0
    """Samples in the last of those batches; 0 where there is none."""

    def after(self, step: int, batch: Batch, ramp: Sequence[RampStage] = ()) -> "Seen":
        """Numbers after `step` steps, if all later batches have the sizes of `batch` and its ramp."""
        samples = self.count_samples(step, batch.global_batch, ramp)
        last_size = self.last_size
        if step > self.step:
            last_size = samples - self.count_samples(step - 1, batch.global_batch, ramp)
        return Seen(step, samples, self.tokens + (samples - self.samples) * batch.seq_len, last_size)

    def count_samples(self, step: int, global_batch: int, ramp: Sequence[RampStage] = ()) -> int:
        """Samples before `step`, if all later batches have this size after a ramp; DataError for an earlier step."""
        if step < 0:
            raise DataError(f"step={step} is negative; steps count from 0")
        if step < self.step:
            raise DataError(f"step={step} is before step {self.step}, from which on samples are counted")
        return count_after(self.samples, step - self.step, global_batch, ramp)


_NOTHING = Seen()


def open_samples(data: DataConfig, folders: Sequence[Path], vocab_size: int, batch: Batch, *, seed: int) -> "Samples":
    """Samples of a run, from one folder of `prepare_tokens` for each of `data.sources`.

    DataError if tokens do not fit the model's vocabulary or a source holds less than one sample.
    """
    sources = []
    for folder, each in zip(folders, data.sources, strict=True):
        tokens = TokenFile.open(folder)
        tokens.check_vocab(vocab_size)
        sources.append(
            SampledSource(tokens, batch.seq_len, str(each.source), data.samples, is_chat=bool(each.messages_field))
        )
    weights = data.weights or tuple(float(each.num_samples) for each in sources)
    return Samples(tuple(sources), batch, seed, weights)


def refuse_untaught(samples: "Samples") -> None:
    """Raise DataError if no sample of any source has a target."""
    if any(source.has_targets for source in samples.sources):
        return
    why = [f"no sample of {each.name} has a target: {each.explain_untaught(each.targets)}" for each in samples.sources]
    raise DataError("; ".join(why))


@dataclass(frozen=True, eq=False)
class SampledSource:
    """Prepared tokens of one source, cut into samples of `seq_len`."""

    tokens: TokenFile
    seq_len: int
    name: str = "the data"
    """Name of the source in refusals."""
    samples: str = "packed"
    """How documents become samples: a key of `DIVISIONS`."""
    is_chat: bool = False
    """Whether documents are conversations."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError(
                f"{self.name} holds {plural(self.tokens.num_tokens, 'token')}, one sample of seq_len={self.seq_len} "
                f"needs {self.seq_len + 1}; use a longer source or a seq_len of at most {self.tokens.num_tokens - 1}"
            )

    @cached_property
    def division(self) -> Division:
        """The samples of this source."""
        return DIVISIONS[self.samples](self.tokens, self.seq_len, keeps_rest=not self.is_chat)

    @property
    def num_samples(self) -> int:
        """Samples in one epoch."""
        return self.division.num_samples

    @cached_property
    def targets(self) -> Targets:
        """Targets of one epoch; counting them reads the whole loss mask."""
        if self.tokens.loss_mask is None and self.samples == "packed":
            return Targets(self.num_samples * self.seq_len, 0)
        return count_all_targets(self.tokens, self.division)

    @property
    def has_targets(self) -> bool:
        """Whether any sample has a target; the first samples mostly tell."""
        if self.tokens.loss_mask is None and self.samples == "packed":
            return True
        return has_targets(self.tokens, self.division)

    def explain_untaught(self, found: Targets) -> str:
        """Reason why samples without a target have none; `found` are the targets of the samples that are looked at."""
        return explain_untaught(found, self.tokens, self.samples, self.seq_len)

    def read_ids(self, sample: int) -> Ints:
        """Token ids of one sample, without padding."""
        length = int(self.division.find(np.array([sample])).lengths.sum())
        return self.read(np.array([sample]))[0][0, :length]

    def read(self, ids_B: Ints) -> tuple[Ints, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """S + 1 tokens of each sample; whether each counts as a target; whether each is the last of its document."""
        whole = self.seq_len + 1
        row_N, first_N, length_N = self.division.find(ids_B)
        before_N = length_N.cumsum() - length_N
        place_N = row_N * whole + before_N - before_N[np.searchsorted(row_N, row_N)]  # in the row of all samples
        passage = np.repeat(np.arange(length_N.size), length_N)
        nth = np.arange(passage.size) - before_N[passage]
        places, positions = place_N[passage] + nth, first_N[passage] + nth

        tokens = np.full(ids_B.size * whole, self.tokens.end_of_document, dtype=np.int64)
        counts, is_last = np.zeros_like(tokens, np.bool_), np.zeros_like(tokens, np.bool_)
        tokens[places] = self.tokens.tokens[positions]
        self.tokens.check_ids(tokens[places], positions)
        counts[places] = True if self.tokens.loss_mask is None else self.tokens.loss_mask[positions] != 0
        counts[place_N] = False
        for place, first, length in zip(place_N, first_N, length_N, strict=True):
            following = slice(*np.searchsorted(self.tokens.documents, (first, first + length), side="right"))
            is_last[place + self.tokens.documents[following] - first - 1] = True
        return tokens.reshape(-1, whole), counts.reshape(-1, whole), is_last.reshape(-1, whole)


@dataclass(frozen=True, eq=False)
class Samples:
    """The batches of a run, `sizes.global_batch` samples a step once its ramp is over."""

    sources: tuple[SampledSource, ...]
    """One entry for each source."""
    sizes: Batch
    seed: int
    weights: tuple[float, ...] = (1.0,)
    """Weight of each source: [Note: shares]."""
    seen: Seen = _NOTHING
    """Totals of earlier steps, whose batches may have had other sizes; from there on batches have `sizes`."""
    is_once: bool = False
    """Whether each sample comes once: what is left of the last batch has no targets. Else another epoch begins."""
    ramp: tuple[RampStage, ...] = ()
    """Smaller batches at the begin of the run."""

    def __post_init__(self) -> None:
        if 0 in self._quotas:
            lost = self.sources[self._quotas.index(0)]
            raise DataError(
                f"the weight of {lost.name} is less than 1 / {ROUND} of all; give it a larger number or leave it out"
            )

    @cached_property
    def _quotas(self) -> list[int]:
        """Samples of each source in a round; the largest remainders are rounded up."""
        shares = np.array(self.weights) / sum(self.weights) * ROUND
        quotas = np.floor(shares).astype(np.int64)
        quotas[np.argsort(quotas - shares, kind="stable")[: ROUND - quotas.sum()]] += 1
        return [int(quota) for quota in quotas]

    @property
    def shares(self) -> list[float]:
        """Share of each source in the samples that are read: [Note: shares]."""
        return [quota / ROUND for quota in self._quotas]

    @property
    def num_samples(self) -> int:
        """Number of samples of all sources."""
        return sum(source.num_samples for source in self.sources)

    @property
    def num_batches(self) -> int:
        """Number of global batches that hold all these samples once; the last one may not be full."""
        return -(-self.num_samples // self.sizes.global_batch)

    @property
    def fingerprint(self) -> str:
        """A text that is equal for two runs only if their samples are the same in the same order, whatever the seed."""
        hashes = [source.tokens.fingerprint for source in self.sources]
        if len(self.sources) > 1:
            hashes = [f"{quota} {found}" for quota, found in zip(self._quotas, hashes, strict=True)]
        name = self.sources[0].samples
        return ", ".join([*hashes, *([name] if name != "packed" else [])])

    def count_before(self, step: int) -> int:
        """Samples in all global batches before that of `step`."""
        return self.seen.count_samples(step, self.sizes.global_batch, self.ramp)

    def size_of(self, step: int) -> int:
        """Samples in the global batch of `step`."""
        return size_after(self.count_before(step), self.sizes.global_batch, self.ramp)

    def number(self, step: int, indices: Sequence[int]) -> Ints:
        """k for each of `indices` in the global batch of `step`: [Note: the order of samples]."""
        return number_samples(self.count_before(step), indices, self.size_of(step))

    def locate(self, step: int, indices: Sequence[int]) -> tuple[Ints, Ints]:
        """Source and number in the source, for the samples at these indices of the global batch of `step`."""
        return self.locate_numbers(self.number(step, indices))

    def locate_numbers(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Source and number in the source, for samples by the order in which a run reads them, from 0."""
        source_B, sample_B = self.deal_numbers(numbers)
        for i, source in enumerate(self.sources):
            is_here = source_B == i
            sample_B[is_here] = shuffle(sample_B[is_here], source.num_samples, self.seed)
        return source_B, sample_B

    def deal_numbers(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Source and number n in its own order, for samples by the order in which a run reads them: [Note: shares]."""
        return deal(numbers, self._quotas, self.seed)

    def batch(self, step: int, indices: Sequence[int]) -> SampleRows:
        """The samples at these indices of the global batch of `step`, [B, S] each."""
        import torch

        source_B, sample_B = self.locate(step, indices)
        shape = (len(source_B), self.sizes.seq_len + 1)
        tokens, counts, is_last = np.empty(shape, np.int64), np.empty(shape, np.bool_), np.empty(shape, np.bool_)
        for i, source in enumerate(self.sources):
            is_here = source_B == i
            tokens[is_here], counts[is_here], is_last[is_here] = source.read(sample_B[is_here])
        if self.is_once:
            counts[self.number(step, indices) >= self.num_samples] = False
        targets = np.where(counts, tokens, IGNORED)[:, 1:]
        return SampleRows(
            *(torch.from_numpy(np.ascontiguousarray(each)) for each in (tokens[:, :-1], targets, is_last[:, :-1]))
        )


def number_samples(seen: int, indices: Sequence[int], global_batch: int) -> Ints:
    """k for each of `indices` in a global batch before which `seen` samples were: [Note: the order of samples]."""
    index = np.asarray(indices, dtype=np.int64).reshape(-1)
    outside = index[(index < 0) | (index >= global_batch)]
    if outside.size:
        raise DataError(f"index {outside[0]} is outside the global batch; use 0 to {global_batch - 1}")
    return seen + index


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
    """Index of the sample for each number of a source: [Note: the order of samples]."""
    epochs, places = np.divmod(numbers, num_samples)
    for epoch in np.unique(epochs):  # one, or two where an epoch ends inside the batch
        places[epochs == epoch] = permute(places[epochs == epoch], num_samples, hash_integers(seed, int(epoch)))
    return places


def own_indices(global_batch: int, dp_rank: int, num_dp_ranks: int) -> range:
    """Part of each global batch that a data-parallel rank reads: [Note: contiguous parts].

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
