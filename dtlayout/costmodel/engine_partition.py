"""Stage split: how many blocks each pipeline stage gets, by its engine's rule; the trainer's is `cost`."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from dtlayout.models.counting import count_block_parameters, count_embedding_parameters
from dtlayout.pipelining.partition import LayerCosts, balance_stages, layer_costs
from dtlayout.spec.batch import Batch
from dtlayout.spec.model_shape import ModelShape


def fill_from_front(costs: LayerCosts, num_stages: int) -> tuple[int, ...]:
    """Blocks of each stage where the costliest is as cheap as can be, and stages are filled from the first one on.

    DeepSpeed's rule (runtime/utils, partition_balanced). Embedding and head count as layers of their own, so a stage
    may hold one of them alone, and the last stages may be small.

    >>> fill_from_front(LayerCosts(block=1.0, num_blocks=10, embedding=1.5, head=1.5), 3)
    (3, 4, 3)
    """
    layers = [costs.embedding, *[costs.block] * costs.num_blocks, costs.head]
    prefix = [0.0, *accumulate(layers)]
    too_low, cap = 0.0, prefix[-1]
    while cap - too_low > 1e-12 * cap:
        tried = (too_low + cap) / 2
        ends = _fill(prefix, num_stages, tried)
        if ends[-1] == len(layers):
            cap = min(tried, max(prefix[end] - prefix[start] for start, end in zip([0, *ends], ends, strict=False)))
        else:
            too_low = tried
    ends = _fill(prefix, num_stages, cap)
    starts = [0, *ends[:-1]]
    return tuple(max(0, min(end, len(layers) - 1) - max(start, 1)) for start, end in zip(starts, ends, strict=True))


def _fill(prefix: Sequence[float], num_stages: int, cap: float) -> list[int]:
    """End of each stage where each takes all the layers that the cap allows; layers are left if it is too small."""
    ends, allowed = [0], cap * (1 + 1e-12)
    for _ in range(num_stages):
        start = ends[-1]
        ends.append(bisect_right(prefix, prefix[start] + allowed, lo=start) - 1)
    return ends[1:]


def fill_by_threshold(costs: LayerCosts, num_stages: int) -> tuple[int, ...]:
    """Blocks of each stage where stage i ends with the block that reaches (i + 1) / num_stages of all costs.

    nanotron's rule (pipeline_parallel/engine, 2024). The last stages may have no block.

    >>> fill_by_threshold(LayerCosts(block=1.0, num_blocks=16, head=4.0), 4)
    (5, 5, 5, 1)
    """
    total = costs.embedding + costs.num_blocks * costs.block + costs.head
    reached = list(accumulate([costs.block] * costs.num_blocks, initial=costs.embedding))
    shares = [total * stage / num_stages * (1 - 1e-12) for stage in range(1, num_stages)]
    ends = [bisect_left(reached, share, lo=1, hi=costs.num_blocks) for share in shares]
    return tuple(end - start for start, end in pairwise([0, *ends, costs.num_blocks]))


def _parameter_costs(model: ModelShape, *, with_embedding: bool) -> LayerCosts:
    block, end = count_block_parameters(model), count_embedding_parameters(model)
    return LayerCosts(block=block, num_blocks=model.num_layers, embedding=end * with_embedding, head=end)


STAGE_SPLITS: dict[str, Callable[[ModelShape, Batch, int], tuple[int, ...]]] = {
    "cost": lambda model, batch, n: balance_stages(layer_costs(model, batch), n),
    "parameters": lambda model, batch, n: fill_from_front(_parameter_costs(model, with_embedding=True), n),
    "threshold": lambda model, batch, n: fill_by_threshold(_parameter_costs(model, with_embedding=False), n),
}
"""`stage_split` of an engine's features → blocks of each of n stages."""
