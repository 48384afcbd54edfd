"""Sizing: the smallest cluster that trains a model, and what more GPUs gain on the same batch."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dtlayout.base.errors import InvalidLayout
from dtlayout.base.formatting import plural
from dtlayout.costmodel.estimate import Estimate, Estimator
from dtlayout.costmodel.parameter_groups import count_apart
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.counting import count_block_parameters
from dtlayout.pipelining.partition import StageSlice
from dtlayout.planner.margin import Margin, choose_margin
from dtlayout.planner.peaks import Peaks, RankSizes
from dtlayout.planner.search import Search
from dtlayout.planner.space import Space
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import divisors

MOST_NODES = 512
"""Largest number of nodes that `find_smallest` tries."""


class ScaleRow(NamedTuple):
    """The best layout on one number of GPUs."""

    scenario: Scenario
    """Model, batch, engine and cluster."""
    estimate: Estimate | None
    """Estimate of the best layout; None if no layout is legal and fits."""
    efficiency: float | None
    """Tokens per second and GPU, as a share of those of the first row with a layout; None without a layout."""
    margin: Margin
    """Memory that was kept free."""

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of the cluster."""
        return self.scenario.cluster.num_gpus


def scale(spaces: Sequence[Space], max_memory: float | None) -> list[ScaleRow]:
    """The best layout of each space; the spaces differ in their number of GPUs alone.

    `max_memory` is the share of the capacity that may be filled; None for all but a margin, where anything fits so.
    """
    rows: list[ScaleRow] = []
    first: float | None = None
    for space in spaces:
        search, margin = find_fitting(space, max_memory)
        best = next(iter(search.run(top=1).ranked), None)
        gpu_seconds = best.step_time_s * space.scenario.cluster.num_gpus if best else None
        first = first or gpu_seconds
        rows.append(ScaleRow(space.scenario, best, first / gpu_seconds if first and gpu_seconds else None, margin))
    return rows


def find_fitting(space: Space, max_memory: float | None, top: int = 1) -> tuple[Search, Margin]:
    """A search with the share of the capacity that was asked for, or with the default margin; where nothing fits so,
    without a margin. Whether anything fits is seen in the best `top` kinds, which the search remembers."""
    margin = choose_margin(space.scenario, max_memory)
    search = Search(space, margin.max_memory)
    if margin.is_asked or margin.max_memory == 1 or search.run_kinds(top).ranked:
        return search, margin
    return search.with_fixed(space.fixed, 1.0), margin.without()


def find_smallest(make_space: Callable[[int], Space], gpus_per_node: int, max_memory: float) -> Space:
    """The space with the fewest GPUs in which a layout is legal and fits; InvalidLayout if there is none.

    `make_space` makes the space of a number of GPUs.
    """
    for num_gpus in cluster_sizes(gpus_per_node):
        space = make_space(num_gpus)
        if _may_fit(space.scenario, num_gpus) and Search(space, max_memory).finds_any():
            return space
    raise InvalidLayout(
        f"no layout fits on any cluster of up to {MOST_NODES} nodes of {plural(gpus_per_node, 'GPU')}; "
        f"use a larger global batch, a shorter sequence, GPUs with more memory, or fewer --fix and --avoid"
    )


def cluster_sizes(gpus_per_node: int) -> Iterator[int]:
    """Numbers of GPUs to try: the divisors of a node's, then whole nodes.

    >>> [n for n, _ in zip(cluster_sizes(4), range(5))]
    [1, 2, 4, 8, 12]
    """
    yield from divisors(gpus_per_node)
    yield from range(2 * gpus_per_node, MOST_NODES * gpus_per_node + 1, gpus_per_node)


def _may_fit(scenario: Scenario, num_gpus: int) -> bool:
    """Whether all GPUs together can hold the state of the blocks, sharded over all: a quick test before the search."""
    n = scenario.model.num_layers * count_block_parameters(scenario.model)
    layout = Layout(dp_shard=num_gpus, zero=3)
    blocks = StageSlice(range(scenario.model.num_layers), embedding=False, head=False)
    sizes = RankSizes(n, 0.0, apart=count_apart(scenario.model, scenario.optimizer, blocks, tp=1))
    least = Peaks(Estimator(scenario)).least_state_bytes(layout, sizes, has_gradients=False)
    return least <= scenario.cluster.gpu.memory_bytes
