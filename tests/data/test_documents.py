"""Where documents start: after each end, at the first token of a sample, and nowhere else."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dtlayout.data.documents import find_starts

END = 2


@given(st.lists(st.lists(st.integers(0, END), min_size=6, max_size=6), min_size=1, max_size=3))
def test_a_document_starts_after_each_end_and_in_each_sample(rows):
    found = find_starts(torch.tensor(rows), END)
    assert found.dtype == torch.int32
    for row, starts in zip(rows, found.tolist(), strict=True):
        for position, start in enumerate(starts):
            ends_before = [i for i in range(position) if row[i] == END]
            assert start == (ends_before[-1] + 1 if ends_before else 0)


def test_samples_without_an_end_are_one_document():
    assert not find_starts(torch.zeros(2, 5, dtype=torch.int64), END).any()
