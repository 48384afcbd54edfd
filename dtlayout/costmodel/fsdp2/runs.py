"""Runs: the blocks of a stage that follow each other and are alike, with the bytes that each of them keeps."""

from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

from dtlayout.costmodel.forward_only import find_first_differentiated, find_forward_only
from dtlayout.costmodel.fsdp2.blocks import Recomputed
from dtlayout.costmodel.fsdp2.sizes import Sizes
from dtlayout.costmodel.fsdp2.units import Unit, UnitBytes, block_units
from dtlayout.pipelining.partition import StageSlice
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.recompute import Recompute

SizesOfKind = Callable[[ModelShape, bool], Sizes]
"""(a kind of block, whether its input needs no gradient) → its sizes."""


class BlockRun(NamedTuple):
    """Blocks of a stage that follow each other and are alike."""

    size: Sizes
    unit: Unit
    kept: float
    """Bytes left by each for its backward."""
    recomputed: Recomputed
    """Bytes added to that when it is computed again."""
    in_forward: float
    """Bytes that its forward holds at its fullest."""
    num_blocks: int
    has_backward: bool
    """True if a weight in these blocks, or before them in the stage, is trained."""
    experts: Unit | None = None
    """Unit of the experts of each, where they have one beside `unit`."""
    at_experts: float = 0.0
    """Bytes held in its forward when it comes to these."""

    @property
    def units(self) -> tuple[Unit, ...]:
        """Units of each block, in the order of the modules."""
        return (self.unit, self.experts) if self.experts else (self.unit,)


def find_runs(
    model: ModelShape, layout: Layout, sizes: SizesOfKind, stage: StageSlice, sharding: UnitBytes
) -> list[BlockRun]:
    """The runs of a stage, first to last."""
    recompute, forward_only = Recompute.parse(layout.recompute), find_forward_only(model, stage)
    last = find_first_differentiated(model) if stage.embedding else None
    runs = []

    def sort(n: int) -> tuple[int, ...]:
        kind = model.block_kinds[n] if model.block_kinds else n < model.num_first
        return recompute.covers(n), kind, n in forward_only, n == last

    for _, run in groupby(stage.layers, sort):
        layer, *others = run
        kind, has_backward = model.kind_of(layer), layer not in forward_only
        size, num_blocks = sizes(kind, layer == last), 1 + len(others)
        options = {"nests_experts": sharding.nests_experts, "base": sharding.base, "scales": sharding.scales}
        unit, experts = block_units(kind, layout.tp, layout.ep, **options)
        kept, again = 0.0, Recomputed(0.0, 0.0)
        if has_backward:
            kept, left = size.kept(recompute, layer), size.recomputed(recompute, layer)
            again = Recomputed(size.recomputed_at_most(recompute) if left else 0.0, left)
        in_forward = size.in_forward(recompute, layer, has_backward=has_backward)
        begin = size.in_experts(recompute, layer)[0] if experts else 0.0
        runs.append(BlockRun(size, unit, kept, again, in_forward, num_blocks, has_backward, experts, begin))
    return runs
