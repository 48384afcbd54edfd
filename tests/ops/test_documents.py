"""Masks and offsets of documents, against loops over tokens."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtlayout.ops.documents import Documents, list_offsets, make_mask


@st.composite
def starts(draw: st.DrawFn) -> list[list[int]]:
    """The start of each token's document, for some samples of one length."""
    seq_len = draw(st.integers(1, 9))
    samples = draw(st.lists(st.sets(st.integers(1, 8)), min_size=1, max_size=3))
    return [[max(p for p in {0, *firsts} if p <= i) for i in range(seq_len)] for firsts in samples]


@given(starts())
def test_offsets_are_where_documents_start_then_the_end_up_to_a_power_of_two(rows):
    flat = [(row, start) for row, starts in enumerate(rows) for start in starts]
    expected = [i for i, document in enumerate(flat) if i == 0 or document != flat[i - 1]]
    found = list_offsets(torch.tensor(rows))
    assert found.dtype == torch.int32
    assert found[: len(expected)].tolist() == expected
    padding = found[len(expected) :].tolist()
    assert padding and set(padding) == {len(flat)}
    assert len(found) & (len(found) - 1) == 0 and len(found) < 2 * (len(expected) + 1)


@given(starts())
def test_a_query_may_see_the_keys_of_its_document_that_are_not_later(rows):
    mask = make_mask(torch.tensor(rows), torch.float64)
    assert mask.shape == (len(rows), 1, len(rows[0]), len(rows[0]))
    for sample, row in zip(mask[:, 0].tolist(), rows, strict=True):
        for query, seen in enumerate(sample):
            assert seen == [0.0 if row[query] <= key <= query else -math.inf for key in range(len(row))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_mask_has_the_format_that_it_is_asked_for(dtype):
    assert make_mask(torch.zeros(1, 3), dtype).dtype == dtype


def test_documents_of_a_microbatch_keep_their_starts():
    starts = torch.tensor([[0, 0, 2]], dtype=torch.int32)
    documents = Documents.from_starts(starts)
    assert torch.equal(documents.starts, starts) and documents.offsets.tolist() == [0, 2, 3, 3]
    assert documents.offsets.device.type == "cpu"


def test_documents_go_to_a_gpu_from_pinned_memory(cuda):
    found = Documents.from_starts(torch.tensor([[0, 0, 2], [0, 1, 1]], dtype=torch.int32))
    documents = Documents(cuda.on_host(found.starts), cuda.on_host(found.offsets))
    pinned = documents.pinned()
    assert len(cuda.pinned_by) == 2 and cuda.is_on_host(pinned.starts) and cuda.is_on_host(pinned.offsets)
    assert torch.equal(pinned.starts, documents.starts) and torch.equal(pinned.offsets, documents.offsets)
