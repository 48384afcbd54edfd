"""Batches that are read ahead: the same as those that are fetched, read while the step works, and waited for."""

import threading
import time

import pytest
import torch

from dtlayout.data.samples import Rows
from dtlayout.errors import DataError
from dtlayout.training.batches import Batches


class Slow:
    """Samples that take some time, all of which end documents of two tokens."""

    def __init__(self, seconds=0.0):
        self.seconds, self.read_by, self.steps = seconds, set(), []

    def batch(self, step, indices):
        if step == 5:
            raise DataError("the disk fell out")
        time.sleep(self.seconds)
        self.read_by.add(threading.current_thread())
        self.steps.append(step)
        tokens = torch.full((len(indices), 4), step)
        return Rows(tokens, tokens + 1, torch.tensor([False, True]).repeat(len(indices), 2))


def open_batches(samples, **options):
    return Batches(samples, range(2), "cpu", **{"has_documents": False, **options})


def test_batches_that_are_read_ahead_are_those_that_are_fetched():
    batches = open_batches(Slow(), has_documents=True)
    for step, batch in zip(range(1, 4), batches.fetch_ahead(range(1, 4)), strict=True):
        fetched = batches.fetch(step)
        assert torch.equal(batch.tokens, fetched.tokens) and torch.equal(batch.targets, fetched.targets)
        assert batch.starts.tolist() == fetched.starts.tolist() == [[0, 0, 2, 2]] * 2


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
