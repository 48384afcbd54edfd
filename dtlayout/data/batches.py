"""Which indices of the global batch a data-parallel rank reads, and in which microbatch.

[Note: contiguous parts]
Rank r reads the r-th of `num_dp_ranks` equal contiguous parts, cut in order into microbatches of `micro_batch`: the
lists of all ranks, put one after the other, are range(global_batch), as if dim 0 of the global batch were sharded. As
an index decides its sample alone, every (micro_batch, num_dp_ranks) trains on the same samples in the same step. The
ranks of one pipeline, tensor or context group share a `dp_rank` and therefore read the same indices.
"""

from dtlayout.errors import DataError


def microbatch_indices(global_batch: int, micro_batch: int, dp_rank: int, num_dp_ranks: int) -> list[list[int]]:
    """One list of `micro_batch` indices for each microbatch of this rank.

    >>> microbatch_indices(8, 2, 1, 2)
    [[4, 5], [6, 7]]
    """
    if min(global_batch, micro_batch, num_dp_ranks) < 1:
        raise DataError(f"{global_batch=}, {micro_batch=}, {num_dp_ranks=}: all must be at least 1")
    if not 0 <= dp_rank < num_dp_ranks:
        raise DataError(f"{dp_rank=} is not one of the {num_dp_ranks} data-parallel ranks; use 0 to {num_dp_ranks - 1}")
    chunk = micro_batch * num_dp_ranks
    if global_batch % chunk:
        below = global_batch - global_batch % chunk
        nearest = f"{below} or {below + chunk}" if below else f"{chunk}"
        raise DataError(
            f"{global_batch=} is no multiple of micro_batch * num_dp_ranks = {micro_batch} * {num_dp_ranks} = {chunk}; "
            f"use {nearest}"
        )
    num_own = global_batch // num_dp_ranks
    starts = range(dp_rank * num_own, (dp_rank + 1) * num_own, micro_batch)
    return [list(range(start, start + micro_batch)) for start in starts]
