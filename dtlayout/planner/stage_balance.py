"""Stage balance: better numbers of blocks for the stages of a pipeline, found block by block, by time or by memory.

The trainer deals blocks out by FLOPs. FLOPs leave out other time of a stage: the loss, messages, recomputation of only
some blocks. They leave out memory too: the first rank has more microbatches in flight than the last. Here a block moves
from the heaviest stage to a light one, as long as the prediction gets better.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from dtlayout.costmodel.estimate import Estimator
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

MOST_STAGES = 16
"""Largest number of stages for which callers balance: each move is predicted, and more stages have few blocks each."""
_TARGETS = 3
"""Number of stages that are tried as a block's target, the lightest ones."""

StageCost = tuple[float, ...]
"""Numbers to lower, compared from the first to the last: seconds of a step, or bytes of ranks, the fullest first."""


def balance_time(estimator: Estimator, layout: Layout, kernels: Kernels) -> Layout:
    """The layout with stages that make its step shorter, or with those it has now if moving no single block does."""

    def cost(cut: Layout) -> StageCost:
        return (estimator.time(cut, kernels, estimator.memory(cut, kernels)).total,)

    def weigh(cut: Layout) -> list[float]:
        return [work.forward_s + work.backward_s for work in estimator.work(cut, kernels)]

    return _improve(_cut(estimator, layout), cost, weigh)


def balance_memory(estimator: Estimator, layout: Layout, kernels: Kernels) -> Layout:
    """The layout with stages whose fullest rank needs less, or with those it has now if moving no block helps."""

    def needs(cut: Layout) -> list[float]:
        return [rank.needed for rank in estimator.memory(cut, kernels)]

    def weigh(cut: Layout) -> list[float]:
        by_rank = needs(cut)
        return [by_rank[cut.placement.rank_of(stage)] for stage in range(cut.num_stages)]

    return _improve(_cut(estimator, layout), lambda cut: tuple(sorted(needs(cut), reverse=True)), weigh)


def _cut(estimator: Estimator, layout: Layout) -> Layout:
    """The layout with its present stages spelled out in `stage_layers`."""
    return replace(layout, stage_layers=tuple(len(stage.layers) for stage in estimator.stages(layout)))


def _improve(layout: Layout, cost: Callable[[Layout], StageCost], weigh: Callable[[Layout], list[float]]) -> Layout:
    """Move one block after the other from the heaviest stages to the lightest, until no move lowers the cost."""
    least = cost(layout)
    while True:
        costs = {moved: cost(moved) for moved in _move(layout, weigh(layout))}
        best = min(costs, key=lambda moved: (costs[moved], moved.stage_layers), default=layout)
        if best == layout or costs[best] >= least:
            return layout
        least, layout = costs[best], best


def _move(layout: Layout, weights: list[float]) -> Iterator[Layout]:
    """Layouts with one block moved from a heaviest stage to a light one; only the end stages may be left empty."""
    counts, last = layout.stage_layers, layout.num_stages - 1
    lightest = sorted(range(last + 1), key=weights.__getitem__)[:_TARGETS]
    for source in (stage for stage in range(last + 1) if weights[stage] == max(weights)):
        if counts[source] > (source not in (0, last)):
            for target in (stage for stage in lightest if stage != source):
                moved = [count - (i == source) + (i == target) for i, count in enumerate(counts)]
                yield replace(layout, stage_layers=tuple(moved))
