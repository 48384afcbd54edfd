"""Lengths: padding, packing and the longest sample of a data set, as a layout would meet them.

Samples longer than a sequence are cut. Padded to the sequence, each sample takes as many tokens as the sequence has.
Padded to the longest of its micro-batch, it takes as many as that one has. Under ZeRO-3 all data-parallel ranks wait
for the longest of them all. Packed, whole samples fill sequences, the longest first into the fullest that has room.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import ceil

from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.estimate import Estimate, estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.spec.batch import Batch
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

_PACKED = 20_000
"""Most samples that are packed; of more, as many with the same distribution."""
_STEP = 256
"""Tokens by which lengths of predicted sequences differ."""


@dataclass(frozen=True)
class Filling:
    """A way to make sequences of samples."""

    name: str
    """Name: padded, padded to the longest, or packed."""
    tokens: float
    """Mean tokens of a sequence, padding included."""
    real_share: float
    """Share of these tokens that are a sample's own."""
    step_time_s: float
    """Seconds of a step with such sequences."""
    real_tokens_per_s_per_gpu: float
    """Tokens of samples that a GPU trains in a second."""


@dataclass(frozen=True)
class Lengths:
    """The samples of a data set beside a layout."""

    samples: int
    mean: float
    median: int
    longest: int
    cut: int
    """Samples that are longer than a sequence."""
    fillings: tuple[Filling, ...]
    """Ways to make sequences, the fastest first."""
    longest_peak_bytes: float
    """Peak of the fullest rank where nothing is cut, and a micro-batch has the longest sample."""
    fits: bool
    """True if that peak fits."""


def weigh_lengths(counts: Mapping[int, int], scenario: Scenario, layout: Layout, kernels: Kernels) -> Lengths:
    """The samples of a data set, length in tokens → number of samples, beside a layout; InvalidConfig without any."""
    if not counts or min(counts) < 1 or min(counts.values()) < 1:
        raise InvalidConfig("lengths are whole numbers above 0, and there must be one")
    seq_len, samples = scenario.batch.seq_len, sum(counts.values())
    kept = Counter[int]()
    for length, number in counts.items():
        kept[min(length, seq_len)] += number
    mean_kept = sum(length * number for length, number in kept.items()) / samples

    @cache
    def predict(tokens: int) -> Estimate:
        batch = Batch(global_batch=scenario.batch.global_batch, seq_len=tokens)
        return estimate(replace(scenario, batch=batch), layout, kernels)

    def fill(name: str, tokens: float, real: float) -> Filling:
        seconds = _interpolate(lambda length: predict(length).step_time_s, tokens, seq_len)
        trained = scenario.batch.global_batch * real / (seconds * layout.world_size)
        return Filling(name, tokens, real / tokens, seconds, trained)

    together = layout.micro_batch * (layout.dp if layout.zero == 3 else 1)
    packed = pack(_thin(kept), seq_len)
    fillings = [
        fill("padded", seq_len, mean_kept),
        fill("padded to the longest", expect_longest(kept, together), mean_kept),
        fill("packed", seq_len, packed * seq_len),
    ]
    whole, cut = predict(_round_up(max(counts))), sum(n for length, n in counts.items() if length > seq_len)
    return Lengths(
        samples=samples, mean=sum(length * number for length, number in counts.items()) / samples,
        median=_find_median(counts), longest=max(counts), cut=cut,
        fillings=tuple(sorted(fillings, key=lambda each: -each.real_tokens_per_s_per_gpu)),
        longest_peak_bytes=whole.peak_bytes, fits=whole.fits,
    )  # fmt: skip


def expect_longest(counts: Mapping[int, int], number: int) -> float:
    """Mean length of the longest of `number` samples that are drawn independently.

    >>> expect_longest({100: 1, 200: 1}, 2)
    175.0
    """
    samples, ordered = sum(counts.values()), sorted(counts)
    shares = [0.0, *((below / samples) ** number for below in accumulate(counts[length] for length in ordered))]
    return sum(length * (after - before) for length, before, after in zip(ordered, shares, shares[1:], strict=False))


def pack(lengths: Sequence[int], seq_len: int) -> float:
    """Share of the tokens of packed sequences that are samples' own. The longest sample is packed first, into the
    fullest sequence that has room for it (best fit).

    >>> pack([600, 500, 400, 300], 1000)
    0.9
    """
    free: list[int] = []  # of each sequence, in ascending order
    sequences = 0
    for length in sorted(lengths, reverse=True):
        place = bisect_left(free, length)
        if place == len(free):
            sequences += 1
            insort(free, seq_len - length)
        else:
            insort(free, free.pop(place) - length)
    return sum(lengths) / (sequences * seq_len)


def _thin(counts: Mapping[int, int]) -> list[int]:
    """Lengths of at most `_PACKED` samples, of which each stands for as many."""
    samples = sum(counts.values())
    ordered = list(_repeat(counts))
    if samples <= _PACKED:
        return ordered
    return [ordered[(2 * place + 1) * samples // (2 * _PACKED)] for place in range(_PACKED)]


def _repeat(counts: Mapping[int, int]) -> Iterator[int]:
    for length in sorted(counts):
        yield from [length] * counts[length]


def _find_median(counts: Mapping[int, int]) -> int:
    half = (sum(counts.values()) + 1) // 2
    return next(
        length
        for length, below in zip(sorted(counts), accumulate(counts[n] for n in sorted(counts)), strict=True)
        if below >= half
    )


def _round_up(tokens: float) -> int:
    return max(_STEP, _STEP * ceil(tokens / _STEP))


def _interpolate(predict: Callable[[int], float], tokens: float, most: int) -> float:
    """A prediction for a mean number of tokens, between two lengths that layouts can have."""
    high = min(most, _round_up(tokens))
    low = max(_STEP, high - _STEP)
    if high <= low or tokens >= high:
        return predict(high)
    share = (tokens - low) / (high - low)
    return (1 - share) * predict(low) + share * predict(high)
