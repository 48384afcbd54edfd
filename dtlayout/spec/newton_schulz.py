"""Newton-Schulz iteration of whole matrices: its numbers, which rank iterates which matrix, and FLOPs; no torch.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces a matrix's momentum by a nearly orthogonal matrix
with the same singular vectors. Five steps of X ← aX + bAX + cA²X with A = XXᵀ bring all singular values near 1.

A matrix has m rows and n columns, or is transposed so that m ≤ n.
"""

from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from math import sqrt
from typing import NamedTuple

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The published a, b and c."""

BUCKET_ELEMENTS = 1 << 26
"""Elements of the matrices that a rank iterates at once, unless one matrix has more: 128 MiB in bf16."""

SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * sqrt(max(rows, columns)),
    "original": lambda rows, columns: sqrt(max(1.0, rows / columns)),
}
"""Name of an adjustment → factor of the learning rate for a matrix of so many rows and columns.

The first gives an update the root mean square of one of AdamW's, 0.2 (arXiv:2502.16982, sec. 2.2).
"""

Sides = tuple[int, int]
"""Rows and columns of a matrix."""


def iteration_flops(shape: Sides, steps: int) -> int:
    """FLOPs of iterating a matrix: XXᵀ and AX take 2·m²·n each, and A² takes 2·m³.

    >>> iteration_flops((3, 2), 5)
    320
    """
    m, n = sorted(shape)
    return steps * (4 * m * m * n + 2 * m**3)


class Bucket(NamedTuple):
    """Matrices that are sent, iterated and sent back together."""

    owned: tuple[tuple[int, ...], ...]
    """For each rank the places of the matrices that it iterates; equal sizes lie beside each other."""


def plan_buckets(shapes: Sequence[Sides], num_ranks: int) -> list[Bucket]:
    """Buckets that hold every matrix once, the largest matrices first, their FLOPs spread evenly over the ranks.

    A bucket has a matrix for each rank, and more while they stay below `BUCKET_ELEMENTS` for each. Every
    rank finds the same.

    >>> plan_buckets([(1, 2), (2, 4), (4, 2)], num_ranks=2)
    [Bucket(owned=((1, 0), (2,)))]
    """
    most = num_ranks * BUCKET_ELEMENTS
    order = sorted(range(len(shapes)), key=lambda i: (-iteration_flops(shapes[i], 1), sorted(shapes[i]), i))
    buckets: list[Bucket] = []
    held, elements = list[int](), 0
    for place in order:
        size = shapes[place][0] * shapes[place][1]
        if len(held) >= num_ranks and elements + size > most:
            buckets.append(_spread(held, shapes, num_ranks))
            held, elements = [], 0
        held.append(place)
        elements += size
    return [*buckets, _spread(held, shapes, num_ranks)] if held else buckets


def _spread(held: Sequence[int], shapes: Sequence[Sides], num_ranks: int) -> Bucket:
    """Each matrix in turn, the largest first, goes to the rank that has least to do."""
    owned: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    heapify(loads)
    for place in held:
        load, rank = loads[0]
        owned[rank].append(place)
        heapreplace(loads, (load + iteration_flops(shapes[place], 1), rank))
    return Bucket(tuple(map(tuple, owned)))
