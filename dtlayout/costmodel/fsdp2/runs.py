"""Runs: the blocks of a stage that follow each other and are alike, with the bytes that each of them keeps."""

from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

from dtlayout.costmodel.forward_only import find_forward_only
from dtlayout.costmodel.fsdp2.sizes import Sizes
from dtlayout.costmodel.fsdp2.units import Unit, block_unit
from dtlayout.pipelining.partition import StageSlice
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.recompute import Recompute


class BlockRun(NamedTuple):
    """Blocks of a stage that follow each other and are alike."""

    size: Sizes
    unit: Unit
    kept: float
    """Bytes left by each for its backward."""
    recomputed: float
    """Bytes added to that when it is computed again."""
    in_last_branch: float
    """Bytes held in its forward's last branch."""
    num_blocks: int
    has_backward: bool
    """Whether a weight is trained in them or before them."""


def find_runs(
    model: ModelShape, layout: Layout, sizes: Mapping[ModelShape, Sizes], stage: StageSlice
) -> list[BlockRun]:
    """The runs of a stage, first to last; `sizes` has those of each kind of block."""
    recompute, forward_only = Recompute.parse(layout.recompute), find_forward_only(model, stage)
    runs = []
    for _, run in groupby(stage.layers, lambda n: (recompute.covers(n), n < model.num_first, n in forward_only)):
        layer, *others = run
        kind, has_backward = model.kind_of(layer), layer not in forward_only
        size, unit, num_blocks = sizes[kind], block_unit(kind, layout.tp, layout.ep), 1 + len(others)
        kept, again, last = 0.0, 0.0, size.in_last_branch_only(recompute, layer)
        if has_backward:
            kept, again = size.kept(recompute, layer), size.recomputed(recompute, layer)
            last = size.in_last_branch(recompute, layer)
        runs.append(BlockRun(size, unit, kept, again, last, num_blocks, has_backward))
    return runs
