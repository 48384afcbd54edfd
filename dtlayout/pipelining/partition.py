"""Partition of a model's blocks into pipeline stages: contiguous runs whose costliest stage is as cheap as can be.

Costs are plain numbers (seconds, FLOPs, bytes: the caller's choice), so that this file needs no cost model.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from dtlayout.models.counting import count_block_flops_per_token, count_head_flops_per_token
from dtlayout.spec.batch import Batch
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape


class LayerCosts(NamedTuple):
    """Costs of the parts of a model, all in one unit."""

    block: float
    """Cost of each block: all blocks of a model are alike."""
    num_blocks: int
    """Blocks of the model."""
    embedding: float = 0.0
    """Cost of the embedding, added to the first stage."""
    head: float = 0.0
    """Cost of the head, added to the last stage."""


class StageSlice(NamedTuple):
    """The part of a model that one pipeline stage holds."""

    layers: range
    """Blocks, counted over the whole model."""
    embedding: bool
    """Whether the stage turns tokens into vectors."""
    head: bool
    """Whether the stage holds the final norm, the head and the loss."""


def layer_costs(model: ModelShape, batch: Batch) -> LayerCosts:
    """Forward FLOPs per token; the embedding is a look-up and costs none."""
    block = count_block_flops_per_token(model, batch.seq_len)
    return LayerCosts(block=block, num_blocks=model.num_layers, head=count_head_flops_per_token(model))


def partition(costs: LayerCosts, layout: Layout) -> list[StageSlice]:
    """The `layout.num_stages` slices of the model: as `layout.stage_layers` says, else balanced by cost."""
    return to_slices(layout.stage_layers or balance_stages(costs, layout.num_stages))


def to_slices(counts: Sequence[int]) -> list[StageSlice]:
    """The slices of stages with these numbers of blocks, the inverse of `count_blocks`."""
    ends = list(accumulate(counts))
    last = len(counts) - 1
    return [
        StageSlice(layers=range(end - count, end), embedding=i == 0, head=i == last)
        for i, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]


def balance_stages(costs: LayerCosts, num_stages: int) -> tuple[int, ...]:
    """Blocks of each stage such that the costliest stage is cheapest and, among those, the squares add up to least.

    The costliest stage sets the pace of a pipeline; the second rule spreads the rest evenly. A stage has at least one
    block. Each further block goes to the stage that is cheapest with it, and to the last one of equals: that fulfils
    both rules.

    >>> balance_stages(LayerCosts(block=1.0, num_blocks=8, head=1.5), 4)
    (2, 2, 3, 1)
    """
    assert 1 <= num_stages <= costs.num_blocks, "Layout.problems refuses more stages than blocks"
    ends = [0.0] * num_stages
    ends[0], ends[-1] = costs.embedding, ends[-1] + costs.head
    # Blocks that each stage surely gets are not dealt out singly: an equal share less one, and less the cost of its
    # end.
    equal = costs.num_blocks // num_stages - 1
    counts = [max(1, equal - ceil(end / costs.block)) for end in ends]
    heap = [(end + count * costs.block, -stage) for stage, (end, count) in enumerate(zip(ends, counts, strict=True))]
    heapify(heap)
    for _ in range(costs.num_blocks - sum(counts)):
        cost, stage = heap[0]
        counts[-stage] += 1
        heapreplace(heap, (cost + costs.block, stage))
    return tuple(counts)


def count_blocks(slices: Sequence[StageSlice]) -> tuple[int, ...]:
    """Blocks of each stage, the form that `layout.stage_layers` takes."""
    return tuple(len(s.layers) for s in slices)
