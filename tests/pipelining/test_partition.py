"""The split into stages: contiguous, complete, and as even as any other split."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlayout.models.presets import PRESETS, find_preset
from dtlayout.pipelining.partition import (
    LayerCosts,
    balance_stages,
    count_blocks,
    layer_costs,
    partition,
)
from dtlayout.spec.batch import Batch
from dtlayout.spec.layout import Layout

cost = st.integers(0, 20)


@st.composite
def small_splits(draw) -> tuple[LayerCosts, int]:
    block, num_blocks = float(draw(st.integers(1, 20))), draw(st.integers(1, 9))
    costs = LayerCosts(block=block, num_blocks=num_blocks, embedding=float(draw(cost)), head=float(draw(cost)))
    return costs, draw(st.integers(1, num_blocks))


def stage_costs(costs: LayerCosts, counts: tuple[int, ...]) -> list[float]:
    """What each stage costs, added up the simple way."""
    stages = [n * costs.block for n in counts]
    stages[0] += costs.embedding
    stages[-1] += costs.head
    return stages


def all_splits(num_blocks: int, num_stages: int) -> list[tuple[int, ...]]:
    """Every way to cut blocks into that many runs of at least one."""
    cuts = ((0, *inner, num_blocks) for inner in combinations(range(1, num_blocks), num_stages - 1))
    return [tuple(b - a for a, b in pairwise(c)) for c in cuts]


@given(small_splits())
def test_no_split_has_a_cheaper_dearest_stage_or_is_as_cheap_and_more_even(split):
    costs, num_stages = split

    def rank(counts: tuple[int, ...]) -> tuple[float, float]:
        stages = stage_costs(costs, counts)
        return max(stages), sum(c * c for c in stages)

    assert rank(balance_stages(costs, num_stages)) == min(map(rank, all_splits(costs.num_blocks, num_stages)))


@given(st.floats(1e-3, 1e3), st.integers(1, 9), st.floats(0, 1e3), st.floats(0, 1e3), st.data())
def test_the_dearest_stage_is_the_cheapest_possible_for_costs_that_do_not_add_up_exactly(
    block, num_blocks, embedding, head, data
):
    costs = LayerCosts(block=block, num_blocks=num_blocks, embedding=embedding, head=head)
    num_stages = data.draw(st.integers(1, num_blocks))
    best = min(max(stage_costs(costs, counts)) for counts in all_splits(num_blocks, num_stages))
    assert max(stage_costs(costs, balance_stages(costs, num_stages))) == pytest.approx(best, rel=1e-11)


@given(st.integers(1, 12), st.data())
def test_a_dearer_head_never_gives_its_stage_more_blocks(num_blocks, data):
    num_stages = data.draw(st.integers(1, num_blocks))
    heads = sorted(data.draw(st.lists(st.floats(0, 6), min_size=2, max_size=4)))
    last = [balance_stages(LayerCosts(block=1.0, num_blocks=num_blocks, head=head), num_stages)[-1] for head in heads]
    assert last == sorted(last, reverse=True)


def test_a_head_worth_two_blocks_takes_their_place():
    even = LayerCosts(block=1.0, num_blocks=10)
    assert balance_stages(even, 4)[-1] in (2, 3)
    assert balance_stages(LayerCosts(block=1.0, num_blocks=10, head=2.0), 4) == (3, 3, 3, 1)
    assert balance_stages(LayerCosts(block=1.0, num_blocks=10, embedding=2.0), 4) == (1, 3, 3, 3)


@given(small_splits(), st.booleans())
def test_slices_are_contiguous_and_complete_and_the_ends_hold_embedding_and_head(split, is_chosen):
    costs, num_stages = split
    counts = balance_stages(costs, num_stages)[::-1] if is_chosen else ()
    slices = partition(costs, Layout(pp=num_stages, stage_layers=counts))
    assert [layer for s in slices for layer in s.layers] == list(range(costs.num_blocks))
    assert [s.embedding for s in slices] == [True] + [False] * (num_stages - 1)
    assert [s.head for s in slices] == [False] * (num_stages - 1) + [True]
    assert count_blocks(slices) == (counts or balance_stages(costs, num_stages))


def test_virtual_stages_are_stages():
    layout = Layout(pp=2, virtual_stages=3, schedule="interleaved-1f1b")
    assert count_blocks(partition(LayerCosts(block=1.0, num_blocks=12), layout)) == (2,) * 6


@pytest.mark.parametrize("name", ["llama3.2-1b", "llama3.1-8b", "llama-13b"])
def test_a_large_vocabulary_takes_blocks_from_the_last_stage(name):
    model = find_preset(name)
    costs = layer_costs(model, Batch(global_batch=8, seq_len=2048))
    counts = count_blocks(partition(costs, Layout(pp=4)))
    stages = stage_costs(costs, counts)
    assert sum(counts) == model.num_layers
    assert counts[-1] <= min(counts[:-1])
    assert max(stages) - min(stages) < costs.block + costs.head


def test_the_largest_model_is_split_over_every_number_of_stages():
    model = max(PRESETS.values(), key=lambda m: m.num_layers)
    costs = layer_costs(model, Batch(global_batch=1, seq_len=4096))
    for num_stages in (1, 16, model.num_layers):
        counts = balance_stages(costs, num_stages)
        assert len(counts) == num_stages
        assert sum(counts) == model.num_layers
        assert max(counts[:-1], default=0) - min(counts[:-1], default=0) <= 1


def test_of_stages_that_cost_the_same_the_last_gets_a_block():
    assert balance_stages(LayerCosts(block=3.0, num_blocks=7), 3) == (2, 2, 3)
    assert balance_stages(LayerCosts(block=1.0, num_blocks=5, embedding=10.0, head=10.0), 3) == (1, 3, 1)
