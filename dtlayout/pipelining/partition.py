"""Which blocks make which pipeline stage: contiguous runs whose costliest stage is as cheap as can be.

Costs come in as plain numbers (seconds, FLOPs, bytes: the caller's choice), so that this file needs no cost model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate
from math import ceil

from dtlayout.batch import Batch
from dtlayout.layout import Layout
from dtlayout.model_shape import ModelShape
from dtlayout.models.counting import count_block_flops_per_token, count_head_flops_per_token


@dataclass(frozen=True)
class LayerCosts:
    """What the pieces of a model cost, in any one unit."""

    blocks: tuple[float, ...]
    """One number a block, first to last."""
    embedding: float = 0.0
    """Added to the first stage."""
    head: float = 0.0
    """Added to the last stage."""


@dataclass(frozen=True, slots=True)
class StageSlice:
    """The part of a model that one pipeline stage holds."""

    stage: int
    """Index of the stage, 0 first."""
    layers: range
    """Blocks, counted over the whole model."""
    embedding: bool
    """Whether it turns tokens into vectors."""
    head: bool
    """Whether it holds the final norm, the head and the loss."""


def layer_costs(model: ModelShape, batch: Batch) -> LayerCosts:
    """Forward FLOPs per token; the embedding is a look-up and costs none."""
    block = float(count_block_flops_per_token(model, batch.seq_len))
    return LayerCosts(blocks=(block,) * model.num_layers, head=float(count_head_flops_per_token(model)))


def partition(costs: LayerCosts, layout: Layout) -> list[StageSlice]:
    """Cut the model into `layout.num_stages` slices: as `layout.stage_layers` says, else by cost."""
    return to_slices(layout.stage_layers or balance_stages(costs, layout.num_stages))


def to_slices(counts: Sequence[int]) -> list[StageSlice]:
    """The slices of stages with so many blocks each, the inverse of `count_blocks`."""
    ends = list(accumulate(counts))
    last = len(counts) - 1
    return [
        StageSlice(stage=i, layers=range(end - count, end), embedding=i == 0, head=i == last)
        for i, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]


def balance_stages(costs: LayerCosts, num_stages: int) -> tuple[int, ...]:
    """Blocks of each stage such that the costliest stage is cheapest and, among those, the squares add up to least.

    The costliest stage sets the pace of a pipeline; the second rule spreads what is left evenly. A stage has at least
    one block. Equal blocks are dealt out one by one, others by dynamic programming, O(num_stages · num_blocks²).

    >>> balance_stages(LayerCosts(blocks=(1.0,) * 8, head=1.5), 4)
    (2, 2, 3, 1)
    """
    num_blocks = len(costs.blocks)
    assert 1 <= num_stages <= num_blocks, "Layout.problems refuses more stages than blocks"
    if len(set(costs.blocks)) == 1:
        return _balance_equal(costs, num_stages)
    prefix = [0.0, *accumulate(costs.blocks)]

    def stage_cost(stage: int, start: int, end: int) -> float:
        ends = costs.embedding * (stage == 0) + costs.head * (stage == num_stages - 1)
        return prefix[end] - prefix[start] + ends

    cap = _solve(num_stages, num_blocks, stage_cost, max, float("inf"))[0]
    allowed = cap * (1 + 1e-12)  # the same sum in another order of addition
    return _solve(num_stages, num_blocks, stage_cost, lambda total, cost: total + cost * cost, allowed)[1]


def _balance_equal(costs: LayerCosts, num_stages: int) -> tuple[int, ...]:
    """Each block to the stage that is cheapest with it, the last of equals: least maximum and least squares at once."""
    block, ends = costs.blocks[0], [0.0] * num_stages
    ends[0], ends[-1] = costs.embedding, ends[-1] + costs.head
    # What each stage surely gets needs no dealing out: an equal number less one block, and less what its end costs.
    equal = len(costs.blocks) // num_stages - 1
    counts = [max(1, equal - ceil(end / block)) for end in ends]
    heap = [(end + count * block, -stage) for stage, (end, count) in enumerate(zip(ends, counts, strict=True))]
    heapify(heap)
    for _ in range(len(costs.blocks) - sum(counts)):
        cost, stage = heap[0]
        counts[-stage] += 1
        heapreplace(heap, (cost + block, stage))
    return tuple(counts)


def _solve(num_stages, num_blocks, stage_cost, combine, allowed) -> tuple[float, tuple[int, ...]]:  # type: ignore[no-untyped-def]
    """Least combined cost of cutting all blocks into stages of at most `allowed`, and the blocks of each stage."""
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ())] + [None] * num_blocks
    for stage in range(num_stages):
        following: list[tuple[float, tuple[int, ...]] | None] = [None] * (num_blocks + 1)
        left = num_stages - stage - 1
        for end in range(stage + 1, num_blocks - left + 1):
            for start in range(stage, end):
                if (before := best[start]) is None or (cost := stage_cost(stage, start, end)) > allowed:
                    continue
                total = combine(before[0], cost)
                if (found := following[end]) is None or total < found[0]:
                    following[end] = (total, (*before[1], end - start))
        best = following
    result = best[num_blocks]
    assert result is not None, "the cap comes from a solution"
    return result


def count_blocks(slices: Sequence[StageSlice]) -> tuple[int, ...]:
    """Blocks of each stage, the form that `layout.stage_layers` takes."""
    return tuple(len(s.layers) for s in slices)
