"""What a rank's own queries see of a sequence that cp's ranks share, cut into pieces that need no mask.

A sequence is in chunks of one length, of which each rank has some (spec/context_parallel.py). A chunk sees what is
before it, from where the document of its first token starts; with tokens of later documents it sees nothing of
that. So own queries see a square of each document in a chunk, in which later keys are hidden, and of what is before a
chunk one rectangle, of which nothing is.

Legend: B batch, b some samples, H query heads, G key-value heads, s tokens of a rank, L of a chunk, c chunks of a rank,
N keys of a piece, K head width.
"""

import pkgutil
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dtlayout.ops.partial import Partial
from dtlayout.plans.collectives import Group
from dtlayout.spec.context_parallel import chunk_length, own_parts
from dtlayout.spec.kernel_table import AttentionKernel, find_kernel


class AttentionTile(NamedTuple):
    """Some own queries, and keys and values of which each of them sees all, but for later ones of a square."""

    samples: slice
    queries: slice
    keys: slice
    """Which of those that came together."""
    k: Tensor
    v: Tensor
    is_square: bool
    """Whether the keys are those of the queries, of which each sees itself and what is before it."""


class VisibleRange(NamedTuple):
    """What own queries of some samples see: of each own chunk, in their order."""

    samples: slice
    starts: list[int]
    """Where the document starts that the chunk's first token is of."""
    lengths: list[int]
    """How many of the chunk's tokens are of this document: others see nothing before the chunk."""
    squares: list[range]
    """The documents of all own chunks, as places among own tokens."""


class Queries:
    """A rank's own queries, what they see, and by what they attend to a piece."""

    def __init__(self, q_BHsK: Tensor, documents: Tensor | None, attention: str, group: Group):
        self.q, self.group = q_BHsK, group
        self.kernel: Partial = pkgutil.resolve_name(find_kernel(AttentionKernel, attention).partial)
        self.exact = torch.promote_types(q_BHsK.dtype, torch.float32)
        num_own = q_BHsK.shape[2]
        seq_len = num_own * group.size
        if documents is None:
            self.length = num_own // 2
            parts = [own_parts("zig-zag", seq_len, group.size, rank) for rank in range(group.size)]
            self.chunks_of = [[part.start // self.length for part in own] for own in parts]
            self.reaches = [VisibleRange(slice(None), [0, 0], [self.length] * 2, [range(num_own)])]
        else:
            self.length = chunk_length(seq_len, group.size)
            shares = documents[0].view(group.size, -1)
            self.chunks_of = (shares[:, :: self.length] // self.length).tolist()
            own_Bs = documents[1:, shares[group.rank]]
            self.reaches = [self._find_reach(sample, starts) for sample, starts in enumerate(own_Bs)]
        self.own = self.chunks_of[group.rank]

    def _find_reach(self, sample: int, starts_s: Tensor) -> VisibleRange:
        starts_cL = starts_s.unflatten(0, (-1, self.length))
        first_c1 = starts_cL[:, :1]
        begins = torch.ones_like(starts_cL, dtype=torch.bool)
        begins[:, 1:] = starts_cL[:, 1:] != starts_cL[:, :-1]
        borders = [*begins.flatten().nonzero().flatten().tolist(), len(starts_s)]
        squares = [range(*each) for each in pairwise(borders)]
        lengths = (starts_cL == first_c1).sum(1).tolist()
        return VisibleRange(slice(sample, sample + 1), first_c1.flatten().tolist(), lengths, squares)

    def attend(self, piece: AttentionTile) -> tuple[Tensor, Tensor]:
        """The piece's result and its log-sum-exp, in fp32 or finer."""
        out, sums = self.kernel.forward(self.q[piece.samples, :, piece.queries], piece.k, piece.v, piece.is_square)
        return out.to(self.exact), sums

    def differentiate(self, piece: AttentionTile, upstream: Tensor, out: Tensor, sums: Tensor, dq: Tensor) -> Tensor:
        """Adds the piece's term to the queries' gradient, and returns those of k and v, [2, b, G, N, K]."""
        seen = [x[piece.samples, :, piece.queries] for x in (upstream, self.q, out, sums)]
        dq_piece, dk, dv = self.kernel.backward(seen[0], seen[1], piece.k, piece.v, seen[2], seen[3], piece.is_square)
        dq[piece.samples, :, piece.queries] += dq_piece
        terms = torch.empty((2, *dk.shape), dtype=self.exact, device=dk.device)
        terms[0], terms[1] = dk, dv
        return terms

    def see_own(self, k: Tensor, v: Tensor) -> list[AttentionTile]:
        """Own keys: squares that have each query once, then what is before a square and no part of one."""
        squares = [
            self._cut(reach.samples, slice(each.start, each.stop), slice(each.start, each.stop), k, v, is_square=True)
            for reach in self.reaches
            for each in reach.squares
        ]
        return squares if self.is_whole else squares + self.see(self.own, k, v)

    @property
    def is_whole(self) -> bool:
        """Whether all own keys are one square: no documents save work."""
        return self.reaches[0].samples == slice(None)

    def see(self, chunks: Sequence[int], k: Tensor, v: Tensor) -> list[AttentionTile]:
        """What own queries see of these chunks, which are in their order; of its own one a chunk sees nothing here."""
        found: list[tuple[slice, slice, slice]] = []
        for reach in self.reaches:
            for i, (own, start, length) in enumerate(zip(self.own, reach.starts, reach.lengths, strict=True)):
                first, end = (bisect_left(chunks, chunk) for chunk in (start // self.length, own))
                if first == end:
                    continue
                skipped = max(0, start - chunks[first] * self.length)
                keys = slice(first * self.length + skipped, end * self.length)
                queries = slice(i * self.length, i * self.length + length)
                if found and found[-1] == (reach.samples, slice(found[-1][1].start, queries.start), keys):
                    queries = slice(found.pop()[1].start, queries.stop)  # neighbours that see the same are one piece
                found.append((reach.samples, queries, keys))
        return [self._cut(*each, k, v, is_square=False) for each in found]

    def _cut(
        self, samples: slice, queries: slice, keys: slice, k: Tensor, v: Tensor, *, is_square: bool
    ) -> AttentionTile:
        return AttentionTile(samples, queries, keys, k[samples, :, keys], v[samples, :, keys], is_square)
