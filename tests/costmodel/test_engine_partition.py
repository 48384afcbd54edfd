"""How engines cut a model into stages: DeepSpeed's rule and nanotron's, as their code does it."""

from dataclasses import replace
from itertools import combinations_with_replacement, pairwise
from typing import get_args, get_type_hints

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dtlayout.costmodel.engine_features import Features
from dtlayout.costmodel.engine_partition import STAGE_SPLITS, fill_by_threshold, fill_from_front
from dtlayout.models.counting import count_block_parameters, count_embedding_parameters
from dtlayout.models.presets import find_preset
from dtlayout.pipelining.partition import LayerCosts

cost = st.integers(0, 20)


def stage_costs(costs: LayerCosts, counts: tuple[int, ...]) -> list[float]:
    """What each stage costs, added up the simple way."""
    stages = [n * costs.block for n in counts]
    stages[0] += costs.embedding
    stages[-1] += costs.head
    return stages


def test_every_habit_has_its_rule():
    assert set(STAGE_SPLITS) == set(get_args(get_type_hints(Features)["stage_split"]))


from_front = st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(0, 30), st.integers(0, 30))


def front_loads(layers: list[float], num_stages: int) -> list[float]:
    """The cheapest costliest stage, found by trying every cut; then each stage takes what fits, first to last."""
    ways = [(0, *cuts, len(layers)) for cuts in combinations_with_replacement(range(len(layers) + 1), num_stages - 1)]
    cap = min(max(sum(layers[a:b]) for a, b in pairwise(way)) for way in ways)
    loads, left = [], list(layers)
    for _ in range(num_stages):
        load = 0.0
        while left and load + left[0] <= cap:
            load += left.pop(0)
        loads.append(load)
    return loads


@given(from_front, st.integers(1, 4))
def test_filling_from_the_front_keeps_the_dearest_stage_as_cheap_as_can_be(sizes, num_stages):
    block, num_blocks, embedding, head = map(float, sizes)
    costs = LayerCosts(block=block, num_blocks=int(num_blocks), embedding=embedding, head=head)
    loads = front_loads([embedding, *[block] * costs.num_blocks, head], num_stages)
    assume(loads[-1] > 0)  # else the next test's case
    counts = fill_from_front(costs, num_stages)
    assert min(counts) >= 0 and sum(counts) == num_blocks
    assert stage_costs(costs, counts) == loads


@pytest.mark.parametrize(
    ("costs", "num_stages", "counts"),
    [
        (LayerCosts(block=1.0, num_blocks=3, head=100.0), 4, (3, 0, 0, 0)),
        (LayerCosts(block=1.0, num_blocks=8, embedding=5.0, head=1.0), 4, (0, 5, 3, 0)),
        (LayerCosts(block=1.0, num_blocks=16, embedding=4.3, head=4.3), 8, (0, 4, 4, 4, 4, 0, 0, 0)),
    ],
)
def test_stages_that_a_heavy_head_leaves_over_are_empty(costs, num_stages, counts):
    assert fill_from_front(costs, num_stages) == counts


@pytest.mark.parametrize(
    ("embedding", "head", "num_stages", "counts"),
    [
        (0.0, 0.0, 1, (8,)),
        (0.0, 0.0, 4, (2, 2, 2, 2)),
        (2.0, 2.0, 4, (1, 3, 3, 1)),
        (3.0, 1.0, 4, (0, 3, 3, 2)),  # an embedding that fills its stage
        (0.0, 5.0, 3, (5, 3, 0)),
    ],
)
def test_filling_from_the_front_by_hand(embedding, head, num_stages, counts):
    costs = LayerCosts(block=1.0, num_blocks=8, embedding=embedding, head=head)
    assert fill_from_front(costs, num_stages) == counts


@pytest.mark.parametrize(
    ("embedding", "head", "num_stages", "counts"),
    [
        (0.0, 0.0, 1, (8,)),
        (0.0, 0.0, 4, (2, 2, 2, 2)),
        (0.0, 4.0, 3, (4, 4, 0)),  # a third of 12 each, and the last one has the head
        (0.0, 2.0, 4, (3, 2, 3, 0)),  # 2.5, 5 and 7.5 are reached with blocks 3, 5 and 8
    ],
)
def test_a_stage_ends_with_the_block_that_reaches_its_share(embedding, head, num_stages, counts):
    costs = LayerCosts(block=1.0, num_blocks=8, embedding=embedding, head=head)
    assert fill_by_threshold(costs, num_stages) == counts


def test_the_playbooks_8b_is_cut_in_two_at_18():
    """Half of 32 · 243 M + 537 M is reached in block 18; measured memory and MFU say so too."""
    model = replace(find_preset("llama3.1-8b"), num_kv_heads=32, vocab_size=131_072)
    block, head = count_block_parameters(model), count_embedding_parameters(model)
    costs = LayerCosts(block=block, num_blocks=model.num_layers, head=head)
    assert fill_by_threshold(costs, 2) == (18, 14)


@given(st.integers(1, 9), st.integers(1, 12), cost, cost, st.integers(1, 6))
def test_shares_by_threshold_are_complete_and_each_ends_no_later_than_it_must(
    block, num_blocks, embedding, head, num_stages
):
    costs = LayerCosts(block=float(block), num_blocks=num_blocks, embedding=float(embedding), head=float(head))
    counts = fill_by_threshold(costs, num_stages)
    assert len(counts) == num_stages and min(counts) >= 0 and sum(counts) == num_blocks
    share = (embedding + num_blocks * block + head) / num_stages
    for stage in range(num_stages - 1):
        end = sum(counts[: stage + 1])
        before_last = embedding + (end - 1) * block
        assert counts[stage] < 2 or before_last < share * (stage + 1) * (1 + 1e-9)


def test_forty_thousand_layers_are_cut_without_looking_at_every_pair_of_them():
    costs = LayerCosts(block=3.0, num_blocks=40_000, embedding=7.0, head=7.0)
    counts = fill_from_front(costs, 1_000)
    assert sum(counts) == 40_000 and max(stage_costs(costs, counts)) == 123.0
