"""Tiles of attention: the keys that a rank's own queries see, in a sequence that cp's ranks share, without masks.

A sequence is in chunks of one length, and each rank has some of them (spec/context_parallel.py). A chunk sees the
tokens before it, from the start of the document to which its first token belongs. Tokens of the chunk that belong to
later documents see nothing before the chunk. So there are two kinds of tiles. A square has the queries and keys of one
document inside a rank's own chunks, and later keys are hidden in it. A rectangle has keys before a chunk, and nothing
is hidden in it.

Legend: B batch, b some samples, H query heads, G key-value heads, s tokens of a rank, L of a chunk, c chunks of a rank,
N keys of a tile, K head width.
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
from dtlayout.spec.kernel_records import AttentionKernel
from dtlayout.spec.kernel_table import find_kernel


class AttentionTile(NamedTuple):
    """Some own queries, with keys and values that each of them sees; in a square, only those that are not later."""

    samples: slice
    queries: slice
    keys: slice
    """Slice of the keys that came together."""
    k: Tensor
    v: Tensor
    is_square: bool
    """Whether keys and queries are the same tokens, so that each query sees itself and earlier keys."""


class VisibleRange(NamedTuple):
    """Range that own queries of some samples see, with one entry for each own chunk, in their order."""

    samples: slice
    starts: list[int]
    """Position at which the document of each chunk's first token starts."""
    lengths: list[int]
    """Number of each chunk's tokens that belong to this document; the other tokens see nothing before the chunk."""
    squares: list[range]
    """Documents inside all own chunks, as ranges of indices among own tokens."""


class Queries:
    """A rank's own queries, the ranges that they see, and the kernel by which they attend to a tile."""

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
            self.ranges = [VisibleRange(slice(None), [0, 0], [self.length] * 2, [range(num_own)])]
        else:
            self.length = chunk_length(seq_len, group.size)
            shares = documents[0].view(group.size, -1)
            self.chunks_of = (shares[:, :: self.length] // self.length).tolist()
            own_Bs = documents[1:, shares[group.rank]]
            self.ranges = [self._find_range(sample, starts) for sample, starts in enumerate(own_Bs)]
        self.own = self.chunks_of[group.rank]

    def _find_range(self, sample: int, starts_s: Tensor) -> VisibleRange:
        starts_cL = starts_s.unflatten(0, (-1, self.length))
        first_c1 = starts_cL[:, :1]
        begins = torch.ones_like(starts_cL, dtype=torch.bool)
        begins[:, 1:] = starts_cL[:, 1:] != starts_cL[:, :-1]
        borders = [*begins.flatten().nonzero().flatten().tolist(), len(starts_s)]
        squares = [range(*each) for each in pairwise(borders)]
        lengths = (starts_cL == first_c1).sum(1).tolist()
        return VisibleRange(slice(sample, sample + 1), first_c1.flatten().tolist(), lengths, squares)

    def attend(self, tile: AttentionTile) -> tuple[Tensor, Tensor]:
        """The tile's result and its log-sum-exp, in fp32 or finer."""
        out, sums = self.kernel.forward(self.q[tile.samples, :, tile.queries], tile.k, tile.v, tile.is_square)
        return out.to(self.exact), sums

    def differentiate(self, tile: AttentionTile, upstream: Tensor, out: Tensor, sums: Tensor, dq: Tensor) -> Tensor:
        """Gradients of the tile's k and v, [2, b, G, N, K]; adds the tile's term to the queries' gradient `dq`."""
        seen = [x[tile.samples, :, tile.queries] for x in (upstream, self.q, out, sums)]
        dq_tile, dk, dv = self.kernel.backward(seen[0], seen[1], tile.k, tile.v, seen[2], seen[3], tile.is_square)
        dq[tile.samples, :, tile.queries] += dq_tile
        terms = torch.empty((2, *dk.shape), dtype=self.exact, device=dk.device)
        terms[0], terms[1] = dk, dv
        return terms

    def own_tiles(self, k: Tensor, v: Tensor) -> list[AttentionTile]:
        """Tiles of own keys: squares with each query once, then rectangles of own keys before a square."""
        squares = [
            self._make_tile(
                visible.samples, slice(each.start, each.stop), slice(each.start, each.stop), k, v, is_square=True
            )
            for visible in self.ranges
            for each in visible.squares
        ]
        return squares if self.is_whole else squares + self.tiles_of(self.own, k, v)

    @property
    def is_whole(self) -> bool:
        """Whether all own keys are one square, as where no documents save work."""
        return self.ranges[0].samples == slice(None)

    def tiles_of(self, chunks: Sequence[int], k: Tensor, v: Tensor) -> list[AttentionTile]:
        """Tiles of these chunks, which are in ascending order; a chunk sees nothing of itself here."""
        found: list[tuple[slice, slice, slice]] = []
        for visible in self.ranges:
            for i, (own, start, length) in enumerate(zip(self.own, visible.starts, visible.lengths, strict=True)):
                first, end = (bisect_left(chunks, chunk) for chunk in (start // self.length, own))
                if first == end:
                    continue
                skipped = max(0, start - chunks[first] * self.length)
                keys = slice(first * self.length + skipped, end * self.length)
                queries = slice(i * self.length, i * self.length + length)
                if found and found[-1] == (visible.samples, slice(found[-1][1].start, queries.start), keys):
                    queries = slice(found.pop()[1].start, queries.stop)  # neighbours that see the same are one tile
                found.append((visible.samples, queries, keys))
        return [self._make_tile(*each, k, v, is_square=False) for each in found]

    def _make_tile(
        self, samples: slice, queries: slice, keys: slice, k: Tensor, v: Tensor, *, is_square: bool
    ) -> AttentionTile:
        return AttentionTile(samples, queries, keys, k[samples, :, keys], v[samples, :, keys], is_square)
