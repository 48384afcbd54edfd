"""Microbatches: every index of the global batch is read once, in order."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlayout.data.batches import microbatch_indices
from dtlayout.errors import DataError

degrees = st.integers(1, 8)


@given(degrees, degrees, degrees)
def test_the_ranks_one_after_the_other_read_the_global_batch(num_microbatches, micro_batch, num_dp_ranks):
    global_batch = num_microbatches * micro_batch * num_dp_ranks
    shares = [microbatch_indices(global_batch, micro_batch, rank, num_dp_ranks) for rank in range(num_dp_ranks)]
    assert all(len(share) == num_microbatches for share in shares)
    assert all(len(indices) == micro_batch for share in shares for indices in share)
    assert list(itertools.chain.from_iterable(itertools.chain(*shares))) == list(range(global_batch))


def test_one_rank_with_one_microbatch_reads_everything():
    assert microbatch_indices(4, 4, 0, 1) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(("global_batch", "nearest"), [(10, "use 6 or 12"), (5, "use 6$")])
def test_a_batch_that_cannot_be_shared_equally_is_an_error(global_batch, nearest):
    with pytest.raises(DataError, match=rf"global_batch={global_batch} is no multiple .* 2 \* 3 = 6; {nearest}"):
        microbatch_indices(global_batch, 2, 0, 3)


@pytest.mark.parametrize("dp_rank", [-1, 3])
def test_a_rank_that_does_not_exist_is_an_error(dp_rank):
    with pytest.raises(DataError, match=f"dp_rank={dp_rank} is not one of the 3"):
        microbatch_indices(6, 2, dp_rank, 3)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_start_at_one(sizes):
    global_batch, micro_batch, num_dp_ranks = sizes
    with pytest.raises(DataError, match="all must be at least 1"):
        microbatch_indices(global_batch, micro_batch, 0, num_dp_ranks)
