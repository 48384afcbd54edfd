"""A training sample as text for people, with its targets marked."""

from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from dtlayout.base.errors import DataError
from dtlayout.base.formatting import plural
from dtlayout.data.beginnings import Beginnings
from dtlayout.data.samples import SampledSource
from dtlayout.data.targets import count_targets
from dtlayout.data.tokenizer import Tokenizer

OPEN, CLOSE = "«", "»"
"""Marks around targets."""


@dataclass(frozen=True)
class ShownPart:
    """Tokens of a document that follow each other, all of them targets or none."""

    text: str
    is_target: bool


@dataclass(frozen=True)
class ShownSample:
    """One sample."""

    source: str
    """Name of its source."""
    sample: int
    """Number of the sample in its source."""
    num_tokens: int
    """Tokens of its documents; one more than `batch.seq_len` where nothing is padding."""
    num_targets: int
    num_padding: int
    documents: tuple[tuple[ShownPart, ...], ...]
    """Parts of each document, special tokens included."""
    why_untaught: str = ""
    """Reason why no token is a target; empty where one is."""
    beginning: tuple[int, int] | None = None
    """Samples and tokens of the beginning, where no more of the source is tokenized; a run then reads another sample in
    this place. None where the source is whole."""

    def mark(self) -> list[str]:
        """Text of each document, with marks around its targets."""
        return [
            "".join(f"{OPEN}{part.text}{CLOSE}" if part.is_target else part.text for part in parts)
            for parts in self.documents
        ]


def show_sample(beginnings: Beginnings, number: int, tokenizer: Tokenizer) -> ShownSample:
    """Sample `number` of a run, by the order in which samples are read, from 0.

    The order of a source that is not whole is unknown. Of such a source, where the run would read its n-th sample, the
    n-th one from its beginning is shown. DataError where the beginning has fewer.
    """
    samples = beginnings.samples
    (index,), (sample,) = samples.locate_numbers(np.array([number]))
    source, is_whole = samples.sources[index], beginnings.are_whole[index]
    if not is_whole:
        sample = samples.num_samples  # more than the source has here
        if number < sample:
            sample = (samples.deal_numbers(np.arange(number))[0] == index).sum()
        if sample >= source.num_samples:
            raise DataError(
                f"sample={number} is outside of {plural(source.num_samples, 'sample')} in the beginning of "
                f"{source.name}, and no more is tokenized; run dtlayout prepare first"
            )
    shown = show_sample_of(source, int(sample), tokenizer)
    return shown if is_whole else replace(shown, beginning=(source.num_samples, source.tokens.num_tokens))


def show_sample_of(source: SampledSource, sample: int, tokenizer: Tokenizer) -> ShownSample:
    """A sample of a source, by its number there."""
    tokens, counts, is_last = (each[0] for each in source.read(np.array([sample])))
    num_tokens = source.read_ids(sample).size
    counts[0] = False  # nothing comes before it
    documents, begin = [], 0
    for end in [*(np.flatnonzero(is_last[: num_tokens - 1]) + 1).tolist(), num_tokens]:
        documents.append(_split(tokens[begin:end].tolist(), counts[begin:end].tolist(), tokenizer))
        begin = end
    num_padding, why = tokens.size - num_tokens, ""
    if not counts.any():
        why = source.explain_untaught(count_targets(source.tokens, source.division, np.array([sample])))
    return ShownSample(source.name, sample, num_tokens, int(counts.sum()), num_padding, tuple(documents), why)


def _split(ids: list[int], counts: list[bool], tokenizer: Tokenizer) -> tuple[ShownPart, ...]:
    """Parts of a document. All ids so far are decoded together: some tokenizers drop the first space of a text."""
    parts, end, shown = [], 0, ""
    for is_target, group in groupby(counts):
        end += sum(1 for _ in group)
        text = tokenizer.spell(ids[:end])
        parts.append(ShownPart(text[len(shown) :], is_target))
        shown = text
    return tuple(parts)
