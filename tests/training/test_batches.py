"""Batches that are read ahead: the same as those that are fetched, read while the step works, and waited for."""

import threading
import time

import pytest
import torch

from dtlayout.base.errors import DataError
from dtlayout.data.samples import SampleRows
from dtlayout.spec.layout import Layout
from dtlayout.training.batches import Batches, take_own


class Slow:
    """Samples that take some time, all of which end documents of two tokens."""

    def __init__(self, seconds=0.0):
        self.seconds, self.read_by, self.steps = seconds, set(), []

    def size_of(self, step):
        return 2

    def batch(self, step, indices):
        if step == 5:
            raise DataError("the disk fell out")
        time.sleep(self.seconds)
        self.read_by.add(threading.current_thread())
        self.steps.append(step)
        tokens = torch.full((len(indices), 4), step)
        return SampleRows(tokens, tokens + 1, torch.tensor([False, True]).repeat(len(indices), 2))


class Numbered(Slow):
    """Samples of tokens that are their own positions."""

    def batch(self, step, indices):
        tokens = torch.arange(4).repeat(len(indices), 1)
        return SampleRows(tokens, tokens + 1, torch.tensor([False, True]).repeat(len(indices), 2))


def open_batches(samples, **options):
    return Batches(samples, "cpu", **{"has_documents": False, "layout": Layout(), "rank": 0, **options})


def test_batches_that_are_read_ahead_are_those_that_are_fetched():
    batches = open_batches(Slow(), has_documents=True)
    for step, batch in zip(range(1, 4), batches.fetch_ahead(range(1, 4)), strict=True):
        fetched = batches.fetch(step)
        assert torch.equal(batch.tokens, fetched.tokens) and torch.equal(batch.targets, fetched.targets)
        assert batch.starts.tolist() == fetched.starts.tolist() == [[0, 0, 2, 2]] * 2


@pytest.mark.parametrize(
    ("method", "has_documents", "own"),
    [("ring", False, [0, 3]), ("ring", True, [0, 1]), ("gather", True, [0, 1]), ("all-to-all", True, [0, 1])],
)
def test_a_rank_of_cp_gets_its_own_tokens_with_their_targets_and_all_starts(method, has_documents, own):
    layout = Layout(cp=2, cp_method=method)
    batch = open_batches(Numbered(), has_documents=has_documents, layout=layout, rank=0).fetch(0)
    assert batch.tokens.tolist() == [own] * 2 and batch.targets.tolist() == [[i + 1 for i in own]] * 2
    assert not has_documents or batch.starts.tolist() == [[0, 0, 2, 2]] * 2


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_documents_decide_anew_for_each_microbatch_which_tokens_a_rank_has(micro_batch):
    starts = torch.tensor([[0, 1, 2, 3, 4, 4, 4, 4], [0, 0, 0, 0, 4, 5, 6, 7]])
    tokens = torch.arange(8).repeat(2, 1)
    layout = Layout(cp=2, micro_batch=micro_batch)
    own = [take_own([tokens], starts, layout, rank)[0] for rank in range(2)]
    assert torch.cat(own, 1).sort(1).values.equal(tokens)
    assert torch.equal(own[0][0], own[0][1]) == (micro_batch == 2)


def test_the_next_batch_is_read_during_a_step_and_none_is_read_that_nobody_wants():
    samples = Slow(seconds=0.2)
    waits = []
    for batch in open_batches(samples).fetch_ahead(range(3)):
        waits.append(batch.wait_s)
        time.sleep(0.4)  # the step
    assert samples.steps == [0, 1, 2]
    assert threading.current_thread() not in samples.read_by
    assert waits[0] >= 0.19 and max(waits[1:]) < 0.1
    assert list(open_batches(samples).fetch_ahead(range(2, 2))) == []


def test_a_step_that_is_faster_than_its_data_knows_how_long_it_waited():
    waits = [batch.wait_s for batch in open_batches(Slow(seconds=0.1)).fetch_ahead(range(3))]
    assert min(waits) >= 0.08


def test_what_goes_wrong_in_reading_is_raised_where_the_batch_is_asked_for():
    batches = open_batches(Slow()).fetch_ahead(range(4, 7))
    assert next(batches).tokens[0, 0] == 4
    with pytest.raises(DataError, match="fell out"):
        next(batches)
