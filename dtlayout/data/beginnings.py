"""Samples of the beginning of each source, for questions that must not wait until a whole corpus is tokenized.

A source that is prepared, or that has no more than a beginning, is whole: its samples are those of a run.
"""

from pathlib import Path
from typing import NamedTuple

from dtlayout.config.config import Config
from dtlayout.config.sections import DataConfig
from dtlayout.data.prepare import prepare_head
from dtlayout.data.samples import Samples, open_samples

_HEAD_TOKENS = 1 << 16
"""Ids of each source that are prepared as a trial, unless one sample needs more."""


class Beginnings(NamedTuple):
    """Samples of the first ids of each source."""

    samples: Samples
    are_whole: tuple[bool, ...]
    """For each source whether these are all its samples."""


def open_beginnings(config: Config, data: DataConfig, folder: Path) -> Beginnings | None:
    """Samples of the beginnings of [data] or of a set of [validation], whose tokens are written below `folder`.

    DataError for what a run would refuse. None where the beginning of a source has nothing to learn from, and later
    text might.
    """
    heads = [prepare_head(each, max(_HEAD_TOKENS, config.batch.seq_len + 1), folder) for each in data.sources]
    if None in heads:
        return None
    folders, are_whole = zip(*filter(None, heads), strict=True)
    samples = open_samples(data, folders, config.model.vocab_size, config.batch, seed=config.train.seed)
    return Beginnings(samples, are_whole)
