"""Targets of a source in one epoch, and the reasons why samples have none.

Legend: N passages, which are runs of a source's tokens that lie in one sample (`dtlayout.data.divisions`); B samples.
The first token of a passage is no target.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dtlayout.data.best_fit import Ints
from dtlayout.data.divisions import Division, Passages
from dtlayout.data.tokens import TokenFile

_SAMPLES_AT_ONCE = 1 << 12


class Targets(NamedTuple):
    """Numbers of targets of a source in one epoch."""

    number: int
    """Tokens that are targets."""
    num_samples_without: int
    """Samples in which no token is one."""
    num_samples_beside: int = 0
    """Samples among those whose documents have targets, but outside of the sample."""


def count_targets(tokens: TokenFile, division: Division, ids_B: Ints) -> Targets:
    """Targets of these samples, which need not be all of an epoch."""
    passages = division.find(ids_B)
    row_N, first_N, length_N = passages
    if tokens.loss_mask is None:
        targets_N = length_N - 1
    else:
        targets_N = _count_marked(tokens, first_N + 1, first_N + length_N)
    is_without_B = np.bincount(row_N, targets_N, minlength=ids_B.size) == 0
    num_beside = _count_beside(tokens, passages, is_without_B) if tokens.loss_mask is not None else 0
    return Targets(int(targets_N.sum()), int(is_without_B.sum()), num_beside)


def count_all_targets(tokens: TokenFile, division: Division) -> Targets:
    """Targets of one epoch; counting them reads the whole loss mask."""
    total = np.zeros(len(Targets._fields), np.int64)
    for start in range(0, division.num_samples, _SAMPLES_AT_ONCE):
        total += count_targets(tokens, division, np.arange(start, min(start + _SAMPLES_AT_ONCE, division.num_samples)))
    return Targets(*total.tolist())


def has_targets(tokens: TokenFile, division: Division) -> bool:
    """Whether any sample of an epoch has a target; no more is read than up to the first one."""
    starts = range(0, division.num_samples, _SAMPLES_AT_ONCE)
    return any(
        count_targets(tokens, division, np.arange(start, min(start + _SAMPLES_AT_ONCE, division.num_samples))).number
        for start in starts
    )


def _count_marked(tokens: TokenFile, begin_N: Ints, end_N: Ints) -> Ints:
    """Ids in each range of the file that the loss mask marks."""
    assert tokens.loss_mask is not None, "who asks has conversations"
    begin, end = begin_N.min(), end_N.max()
    places = begin + np.flatnonzero(tokens.loss_mask[begin:end])
    return np.searchsorted(places, end_N) - np.searchsorted(places, begin_N)


def _count_beside(tokens: TokenFile, passages: Passages, is_without_B: npt.NDArray[np.bool_]) -> int:
    """Samples of `is_without_B` whose documents have a target outside of the sample."""
    row_N, first_N, length_N = (each[is_without_B[passages.rows]] for each in passages)
    if not row_N.size:
        return 0
    end_N = first_N + length_N
    begins_N = tokens.documents[np.searchsorted(tokens.documents, first_N, side="right") - 1]
    ends_N = tokens.documents[np.searchsorted(tokens.documents, end_N)]
    outside_N = _count_marked(tokens, begins_N, ends_N) - _count_marked(tokens, first_N, end_N)
    return int((np.bincount(row_N, outside_N) > 0).sum())


def explain_untaught(found: Targets, tokens: TokenFile, samples: str, seq_len: int) -> str:
    """Reason why nothing is learnt from `found.num_samples_without` samples, of which there is at least one."""
    if tokens.loss_mask is None:
        return "a document there is empty, or of one token, before which there is none"
    what = "the last answer of each conversation lies" if tokens.loss_on == "last" else "the answers lie"
    where = "in other samples of" if samples == "packed" else "behind"
    cut = "" if samples == "packed" else ", where a conversation is cut"
    beside = f"{what} {where} batch.seq_len={seq_len}{cut}"
    none = "no conversation there has an answer that is learnt"
    num_none = found.num_samples_without - found.num_samples_beside
    if not num_none:
        return beside
    if not found.num_samples_beside:
        return none
    return f"in {found.num_samples_beside:,}, {beside}; in {num_none:,}, {none}"
