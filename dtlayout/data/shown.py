"""A training sample as text for people, with its targets marked."""

from dataclasses import dataclass
from itertools import groupby

import numpy as np

from dtlayout.data.samples import SampledSource, Samples
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

    def mark(self) -> list[str]:
        """Text of each document, with marks around its targets."""
        return [
            "".join(f"{OPEN}{part.text}{CLOSE}" if part.is_target else part.text for part in parts)
            for parts in self.documents
        ]


def show_sample(samples: Samples, number: int, tokenizer: Tokenizer) -> ShownSample:
    """Sample `number` of a run, by the order in which samples are read, from 0."""
    sources, ids = samples.locate_numbers(np.array([number]))
    return show_sample_of(samples.sources[int(sources[0])], int(ids[0]), tokenizer)


def show_sample_of(source: SampledSource, sample: int, tokenizer: Tokenizer) -> ShownSample:
    """A sample of a source, by its number there."""
    tokens, counts, is_last = (each[0] for each in source.read(np.array([sample])))
    num_tokens = source.read_ids(sample).size
    counts[0] = False  # nothing comes before it
    documents, begin = [], 0
    for end in [*(np.flatnonzero(is_last[: num_tokens - 1]) + 1).tolist(), num_tokens]:
        documents.append(_split(tokens[begin:end].tolist(), counts[begin:end].tolist(), tokenizer))
        begin = end
    num_padding = tokens.size - num_tokens
    return ShownSample(source.name, sample, num_tokens, int(counts.sum()), num_padding, tuple(documents))


def _split(ids: list[int], counts: list[bool], tokenizer: Tokenizer) -> tuple[ShownPart, ...]:
    """Parts of a document. All ids so far are decoded together: some tokenizers drop the first space of a text."""
    parts, end, shown = [], 0, ""
    for is_target, group in groupby(counts):
        end += sum(1 for _ in group)
        text = tokenizer.spell(ids[:end])
        parts.append(ShownPart(text[len(shown) :], is_target))
        shown = text
    return tuple(parts)
