"""Best-fit packing: no document is cut that fits, each token is learnt once, and nothing depends on who asks."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtlayout.data import best_fit
from dtlayout.data.best_fit import fit, open_packing
from dtlayout.data.samples import SampledSource, Samples, find_starts
from dtlayout.data.tokens import TokenFile
from dtlayout.spec.batch import IGNORED, Batch

lengths_of_documents = st.lists(st.integers(1, 30), min_size=1, max_size=40)


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(best_fit, "WINDOW", 7)


def fit_slowly(lengths, room):
    """The definition: each passage, the longest first, goes where the least room is left, or to a new sample."""
    left, found = [], {}
    for passage in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        able = [sample for sample, space in enumerate(left) if space >= lengths[passage]]
        if not able:
            able = [len(left)]
            left.append(room)
        found[passage] = min(able, key=lambda sample: left[sample])
        left[found[passage]] -= lengths[passage]
    return sorted(left)


@given(st.lists(st.integers(1, 20), max_size=60))
def test_each_passage_goes_where_it_leaves_the_least_room(lengths):
    samples = fit(np.array(lengths, dtype=np.int64), 20)
    left = [20 - sum(np.array(lengths)[np.array(samples) == i]) for i in range(max(samples, default=-1) + 1)]
    assert sorted(left) == fit_slowly(lengths, 20)
    assert all(space >= 0 for space in left)


def open_source(folder, seq_len, **options):
    return SampledSource(TokenFile.open(folder), seq_len, samples="best-fit", **options)


@given(lengths=lengths_of_documents, seq_len=st.integers(2, 12), is_chat=st.booleans())
def test_what_fits_is_whole_and_each_token_that_is_kept_is_a_target_once(tmp_path_factory, lengths, seq_len, is_chat):
    documents = np.cumsum([0, *lengths])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_fit, "WINDOW", 7)
        folder = tmp_path_factory.mktemp("packing")
        packing = open_packing(folder, documents, seq_len, keeps_rest=not is_chat)
    passages = []
    for begin, end in pairwise(packing.offsets.tolist()):
        inside = []
        for first in packing.firsts[begin:end].tolist():
            document = int(np.searchsorted(documents, first, side="right")) - 1
            inside.append((document, first, min(int(documents[document + 1]), first + seq_len + 1)))
        assert sum(end - first for _, first, end in inside) <= seq_len + 1 and inside == sorted(inside)
        passages += inside
    for document, length in enumerate(lengths):
        mine = sorted((first, end) for each, first, end in passages if each == document)
        start = int(documents[document])
        if length <= seq_len + 1:
            assert mine == [(start, start + length)]
        elif is_chat:  # the rest would be answers without their prompt
            assert mine == [(start, start + seq_len + 1)]
        else:
            targets = [place for first, end in mine for place in range(first + 1, end)]
            assert targets == list(range(start + 1, start + length))
    assert packing.num_cut == sum(length > seq_len + 1 for length in lengths)
    assert packing.num_tokens == sum(end - first for _, first, end in passages)


def test_samples_hold_what_padded_samples_hold_and_keep_documents_apart(write_tokens, small_windows):
    """The same inputs, targets and positions of each document, in fewer samples."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 18, 50).tolist()
    loss_mask = generator.integers(0, 2, sum(lengths)).tolist()
    folder = write_tokens(range(1000, 1000 + sum(lengths)), vocab_size=5000, documents=lengths, loss_mask=loss_mask)
    found = {}
    for kind in ("padded", "best-fit"):
        source = SampledSource(TokenFile.open(folder), 16, samples=kind, is_chat=True)
        samples = Samples((source,), Batch(seq_len=16, global_batch=1), seed=3)
        texts = []
        for step in range(samples.num_samples):
            tokens, targets, is_last = (each[0] for each in samples.batch(step, [0]))
            starts = find_starts(is_last[None])[0]
            for start in starts.unique().tolist():
                here = starts == start
                learnt = (targets[here] != IGNORED).nonzero().flatten().tolist()
                end = learnt[-1] + 1 if learnt else 0  # nothing is learnt from the tokens behind the last target
                texts.append((tokens[here][:end].tolist(), targets[here][:end].tolist()))
        found[kind] = samples.num_samples, sorted(text for text in texts if text[0])
    (num_padded, padded), (num_packed, packed) = found["padded"], found["best-fit"]
    assert padded == packed and len(packed) > 30
    assert num_packed < 0.7 * num_padded


def test_the_order_is_that_of_seed_and_step_however_batches_are_cut(write_tokens, small_windows):
    folder = write_tokens(range(300), vocab_size=512, documents=[11, 3, 6, 10, 5, 7, 8] * 6)
    samples = Samples((open_source(folder, 12),), Batch(seq_len=12, global_batch=6), seed=1)
    smaller = Samples((open_source(folder, 12),), Batch(seq_len=12, global_batch=3), seed=1)
    for step in (0, 9):
        whole = samples.batch(step, range(6))
        halves = [smaller.batch(2 * step + half, range(3)) for half in range(2)]
        alone = [samples.batch(step, [index]) for index in range(6)]
        for parts in (halves, alone):
            assert all(
                torch.equal(torch.cat(got), one) for got, one in zip(zip(*parts, strict=True), whole, strict=True)
            )
    seen = torch.cat([smaller.batch(step, range(3)).tokens for step in range(smaller.num_samples // 3)])
    assert len({tuple(row) for row in seen.tolist()}) == len(seen)
    packed = Samples((SampledSource(TokenFile.open(folder), 12),), Batch(seq_len=12, global_batch=6), seed=1)
    assert packed.fingerprint != samples.fingerprint == smaller.fingerprint


def test_windows_bound_what_is_in_memory_however_long_a_document_is(small_windows):
    documents = np.cumsum([0, 5, 1000, *[3] * 20])
    windows = [list(window) for window in best_fit._cut(documents, 4, keeps_rest=True)]
    assert max(firsts.size for firsts, _, _ in windows) == 7
    assert sum(cut for _, _, cut in windows) == 1


def test_a_packing_is_made_once_and_again_where_it_is_not_whole(write_tokens, monkeypatch):
    folder = write_tokens(range(40), documents=[10, 4, 6, 20])
    first = open_source(folder, 8).num_samples
    path = folder / "best-fit-8.bin"
    written = path.read_bytes()
    monkeypatch.setattr(best_fit, "_write", None)
    assert open_source(folder, 8).num_samples == first
    monkeypatch.undo()
    path.write_bytes(written[:-8])
    assert open_source(folder, 8).num_samples == first and path.read_bytes() == written
    assert not list(folder.glob("*.partial"))


def test_a_folder_that_cannot_be_written_is_packed_elsewhere(write_tokens, monkeypatch):
    folder = write_tokens(range(40), documents=[10, 4, 6, 20])
    expected = open_source(folder, 8).read(np.arange(2))
    (folder / "best-fit-8.bin").unlink()

    def refuse(*_):
        raise OSError("read-only file system")

    monkeypatch.setattr(Path, "replace", refuse)
    source = open_source(folder, 8)
    assert all((one == other).all() for one, other in zip(source.read(np.arange(2)), expected, strict=True))
    assert not list(folder.glob("best-fit*"))
