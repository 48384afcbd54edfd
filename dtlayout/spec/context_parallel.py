"""Methods by which ranks attend to each other's tokens, and the positions of a sequence that each rank has. No torch.

All ranks have as many tokens. Under a causal mask later tokens attend to more. So where a rank attends with its own
queries, it has two halves: the r-th part from the front and the r-th from the back (zig-zag; arXiv:2311.09431, sec. 3,
with halves for stripes). All ranks then have as much to do. Where documents are kept apart this does not hold, and a
rank has chunks that are dealt out by the number of tokens to which they attend: `deal_chunks`.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ContextMethod:
    """One method of attention over the ranks of cp."""

    name: str
    """The value of `layout.cp_method`."""
    attend: str
    """Function, "module:name", that replaces a module's attention by one of all ranks; plans/context.py says its
    arguments."""
    splits_heads: bool = False
    """Whether each rank attends for some of the heads to the whole sequence, by any kernel. Else it attends for its own
    tokens to all tokens, part after part, by a kernel that also returns the log-sum-exp of its scores."""
    messages: str
    """Messages of a block over cp in forward and in backward."""

    @property
    def order(self) -> str:
        """Order in which positions are dealt out to ranks, one of the names that `own_parts` knows."""
        return "contiguous" if self.splits_heads else "zig-zag"

    def granule(self, cp: int) -> int:
        """Number of which the length of a sequence has to be a multiple."""
        return cp if self.splits_heads else 2 * cp


CONTEXT_METHODS = {
    method.name: method
    for method in (
        ContextMethod(
            name="ring", attend="dtlayout.plans.context:attend_in_parts",
            messages="keys and values from rank to rank, in backward their gradients too",
        ),
        ContextMethod(
            name="gather", attend="dtlayout.plans.context:attend_in_parts",
            messages="an all-gather of keys and values, again in backward, and a reduce-scatter of their gradients",
        ),
        ContextMethod(
            name="all-to-all", attend="dtlayout.plans.context:attend_by_heads", splits_heads=True,
            messages="an all-to-all of queries, keys and values and one of the results, and so their gradients",
        ),
    )
}  # fmt: skip
DEFAULT_CONTEXT_METHOD = "ring"
_MOST_CHUNKS = 16
"""Most chunks of a sequence for each rank: more would be no more even, and would make kernels smaller."""


def own_parts(order: str, seq_len: int, cp: int, rank: int) -> tuple[range, ...]:
    """The positions of a sequence that rank `rank` of `cp` ranks has, in their order.

    >>> own_parts("zig-zag", 16, 2, 0), own_parts("contiguous", 16, 2, 1)
    ((range(0, 4), range(12, 16)), (range(8, 16),))
    """
    if order == "contiguous":
        size = seq_len // cp
        return (range(rank * size, (rank + 1) * size),)
    half, back = seq_len // (2 * cp), 2 * cp - 1 - rank
    return range(rank * half, (rank + 1) * half), range(back * half, (back + 1) * half)


def chunk_length(seq_len: int, cp: int) -> int:
    """Tokens of each chunk of a sequence of documents: a rank has an even number of chunks, 16 at most.

    >>> chunk_length(131072, 8), chunk_length(24, 4)
    (1024, 1)
    """
    half = seq_len // (2 * cp)
    return half // max(k for k in range(1, _MOST_CHUNKS // 2 + 1) if half % k == 0)


def deal_chunks(costs: Sequence[int], cp: int) -> list[list[int]]:
    """Indices of the chunks of each of `cp` ranks, in order: each rank has as many, and nearly as much to do.

    The costliest chunk that is left goes to the rank that has least to do and still has room, to the first of equal
    ranks. This is longest processing time first (Graham, 1969) with a limit on the number. Every rank finds the same.

    >>> deal_chunks([1, 2, 3, 4], 2), deal_chunks([1, 2, 1, 2, 9, 1], 3)
    ([[0, 3], [1, 2]], [[4, 5], [0, 1], [2, 3]])
    """
    shares: list[list[int]] = [[] for _ in range(cp)]
    work, room = [0] * cp, len(costs) // cp
    for chunk in sorted(range(len(costs)), key=lambda chunk: -costs[chunk]):
        rank = min((r for r in range(cp) if len(shares[r]) < room), key=work.__getitem__)
        shares[rank].append(chunk)
        work[rank] += costs[chunk]
    return [sorted(share) for share in shares]
