"""Splits: how many blocks each stage of a pipeline has, made better block by block, by time or by memory.

The trainer deals blocks out by FLOPs. That leaves out what else a stage takes (the head's loss, messages, recomputation
of some blocks alone) and what it holds: a first rank has more microbatches in flight than a last one. Here a block goes
from where most is to where least is, as long as a prediction says that it helps.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from dtlayout.costmodel.estimate import Estimator
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

MOST_STAGES = 16
"""Of a layout that is worth it: more have few blocks each, of which each move is predicted."""
_TARGETS = 3
"""Stages that are tried for a block, those that have least."""

StageCost = tuple[float, ...]
"""What is to become less, the most important first."""


def balance_time(estimator: Estimator, layout: Layout, kernels: Kernels) -> Layout:
    """The layout with a split whose step is shorter, or as it is cut now if no single block that moves makes it so."""

    def cost(cut: Layout) -> StageCost:
        return (estimator.time(cut, kernels, estimator.memory(cut, kernels)).total,)

    def weigh(cut: Layout) -> list[float]:
        return [work.forward_s + work.backward_s for work in estimator.work(cut, kernels)]

    return _improve(_cut(estimator, layout), cost, weigh)


def balance_memory(estimator: Estimator, layout: Layout, kernels: Kernels) -> Layout:
    """The layout with a split whose fullest rank needs less, or as it is cut now if no block that moves makes it so."""

    def needs(cut: Layout) -> list[float]:
        return [rank.needed for rank in estimator.memory(cut, kernels)]

    def weigh(cut: Layout) -> list[float]:
        by_rank = needs(cut)
        return [by_rank[cut.placement.rank_of(stage)] for stage in range(cut.num_stages)]

    return _improve(_cut(estimator, layout), lambda cut: tuple(sorted(needs(cut), reverse=True)), weigh)


def _cut(estimator: Estimator, layout: Layout) -> Layout:
    return replace(layout, stage_layers=tuple(len(stage.layers) for stage in estimator.stages(layout)))


def _improve(layout: Layout, cost: Callable[[Layout], StageCost], weigh: Callable[[Layout], list[float]]) -> Layout:
    """Move blocks from the heaviest stages to the lightest ones until that costs no less."""
    least = cost(layout)
    while True:
        costs = {moved: cost(moved) for moved in _move(layout, weigh(layout))}
        best = min(costs, key=lambda moved: (costs[moved], moved.stage_layers), default=layout)
        if best == layout or costs[best] >= least:
            return layout
        least, layout = costs[best], best


def _move(layout: Layout, weights: list[float]) -> Iterator[Layout]:
    """The layout with one block moved; only the first and the last stage may be left with none."""
    counts, last = layout.stage_layers, layout.num_stages - 1
    lightest = sorted(range(last + 1), key=weights.__getitem__)[:_TARGETS]
    for source in (stage for stage in range(last + 1) if weights[stage] == max(weights)):
        if counts[source] > (source not in (0, last)):
            for target in (stage for stage in lightest if stage != source):
                moved = [count - (i == source) + (i == target) for i, count in enumerate(counts)]
                yield replace(layout, stage_layers=tuple(moved))
