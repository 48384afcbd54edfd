"""The split into stages: contiguous, complete, and as even as any other split."""

from dataclasses import replace
from itertools import combinations, combinations_with_replacement, pairwise
from math import nextafter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dtlayout.batch import Batch
from dtlayout.layout import Layout
from dtlayout.models.counting import count_block_parameters, count_embedding_parameters
from dtlayout.models.presets import PRESETS, find_preset
from dtlayout.pipelining.partition import (
    LayerCosts,
    count_blocks,
    layer_costs,
    partition,
    share_out,
    share_out_by_threshold,
    share_out_from_front,
)

cost = st.integers(0, 20)


@st.composite
def small_splits(draw) -> tuple[LayerCosts, int]:
    blocks = draw(st.lists(st.integers(1, 20), min_size=1, max_size=8))
    costs = LayerCosts(blocks=tuple(map(float, blocks)), embedding=float(draw(cost)), head=float(draw(cost)))
    return costs, draw(st.integers(1, len(blocks)))


def stage_costs(costs: LayerCosts, counts: tuple[int, ...]) -> list[float]:
    """What each stage costs, added up the simple way."""
    starts = [sum(counts[:i]) for i in range(len(counts))]
    stages = [sum(costs.blocks[start : start + n]) for start, n in zip(starts, counts, strict=True)]
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

    assert rank(share_out(costs, num_stages)) == min(map(rank, all_splits(len(costs.blocks), num_stages)))


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=7), st.floats(0, 1e3), st.data())
def test_the_dearest_stage_is_the_cheapest_possible_for_costs_that_do_not_add_up_exactly(blocks, head, data):
    costs = LayerCosts(blocks=tuple(blocks), head=head)
    num_stages = data.draw(st.integers(1, len(blocks)))
    best = min(max(stage_costs(costs, counts)) for counts in all_splits(len(blocks), num_stages))
    assert max(stage_costs(costs, share_out(costs, num_stages))) == pytest.approx(best, rel=1e-11)


@given(st.integers(1, 12), st.data())
def test_a_dearer_head_never_gives_its_stage_more_blocks(num_blocks, data):
    num_stages = data.draw(st.integers(1, num_blocks))
    heads = sorted(data.draw(st.lists(st.floats(0, 6), min_size=2, max_size=4)))
    last = [share_out(LayerCosts(blocks=(1.0,) * num_blocks, head=head), num_stages)[-1] for head in heads]
    assert last == sorted(last, reverse=True)


def test_a_head_worth_two_blocks_takes_their_place():
    even = LayerCosts(blocks=(1.0,) * 10)
    assert share_out(even, 4)[-1] in (2, 3)
    assert share_out(LayerCosts(blocks=(1.0,) * 10, head=2.0), 4) == (3, 3, 3, 1)
    assert share_out(LayerCosts(blocks=(1.0,) * 10, embedding=2.0), 4) == (1, 3, 3, 3)


@given(small_splits(), st.booleans())
def test_slices_are_contiguous_and_complete_and_the_ends_hold_embedding_and_head(split, is_chosen):
    costs, num_stages = split
    counts = share_out(costs, num_stages)[::-1] if is_chosen else ()
    slices = partition(costs, Layout(pp=num_stages, stage_layers=counts))
    assert [s.stage for s in slices] == list(range(num_stages))
    assert [layer for s in slices for layer in s.layers] == list(range(len(costs.blocks)))
    assert [s.embedding for s in slices] == [True] + [False] * (num_stages - 1)
    assert [s.head for s in slices] == [False] * (num_stages - 1) + [True]
    assert count_blocks(slices) == (counts or share_out(costs, num_stages))


def test_virtual_stages_are_stages():
    layout = Layout(pp=2, virtual_stages=3, schedule="interleaved-1f1b")
    assert count_blocks(partition(LayerCosts(blocks=(1.0,) * 12), layout)) == (2,) * 6


@pytest.mark.parametrize("name", ["llama3.2-1b", "llama3.1-8b", "llama-13b"])
def test_a_large_vocabulary_takes_blocks_from_the_last_stage(name):
    model = find_preset(name)
    costs = layer_costs(model, Batch(global_batch=8, seq_len=2048))
    counts = count_blocks(partition(costs, Layout(pp=4)))
    stages = stage_costs(costs, counts)
    assert sum(counts) == model.num_layers
    assert counts[-1] <= min(counts[:-1])
    assert max(stages) - min(stages) < max(costs.blocks) + costs.head


def test_the_largest_model_is_split_over_every_number_of_stages():
    model = max(PRESETS.values(), key=lambda m: m.num_layers)
    costs = layer_costs(model, Batch(global_batch=1, seq_len=4096))
    for num_stages in (1, 16, model.num_layers):
        counts = share_out(costs, num_stages)
        assert len(counts) == num_stages
        assert sum(counts) == model.num_layers
        assert max(counts[:-1], default=0) - min(counts[:-1], default=0) <= 1


@settings(deadline=None)
@given(st.integers(1, 30), st.floats(0, 30), st.floats(0, 30), st.data())
def test_equal_blocks_are_dealt_out_as_well_as_by_the_dynamic_programme(num_blocks, embedding, head, data):
    """One block that costs one bit more sends the same problem to the dynamic programme."""
    num_stages = data.draw(st.integers(1, num_blocks))
    equal = LayerCosts(blocks=(1.0,) * num_blocks, embedding=embedding, head=head)
    almost = replace(equal, blocks=(*equal.blocks[:-1], nextafter(1.0, 2.0)))

    def rank(costs: LayerCosts) -> tuple[float, float]:
        stages = stage_costs(equal, share_out(costs, num_stages))
        return max(stages), sum(cost * cost for cost in stages)

    assert rank(equal) == pytest.approx(rank(almost), rel=1e-11)


def test_blocks_that_all_cost_the_same_go_to_the_first_stage_that_is_cheapest():
    assert share_out(LayerCosts(blocks=(3.0,) * 7), 3) == (2, 2, 3)
    assert share_out(LayerCosts(blocks=(1.0,) * 5, embedding=10.0, head=10.0), 3) == (1, 3, 1)


from_front = st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(0, 30), st.integers(0, 30))


def front_loads(layers: list[float], num_stages: int) -> list[float]:
    """The cheapest dearest stage, found by trying every cut; then each stage takes what fits, first to last."""
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
    blocks, embedding, head = sizes
    costs = LayerCosts(blocks=tuple(map(float, blocks)), embedding=float(embedding), head=float(head))
    loads = front_loads([costs.embedding, *costs.blocks, costs.head], num_stages)
    assume(loads[-1] > 0)  # else the next test's case
    counts = share_out_from_front(costs, num_stages)
    assert min(counts) >= 0 and sum(counts) == len(blocks)
    assert stage_costs(costs, counts) == loads


@pytest.mark.parametrize(
    ("costs", "num_stages", "counts"),
    [
        (LayerCosts(blocks=(1.0,) * 3, head=100.0), 4, (3, 0, 0, 0)),
        (LayerCosts(blocks=(1.0,) * 8, embedding=5.0, head=1.0), 4, (0, 5, 3, 0)),
        (LayerCosts(blocks=(1.0,) * 16, embedding=4.3, head=4.3), 8, (0, 4, 4, 4, 4, 0, 0, 0)),
    ],
)
def test_stages_that_a_heavy_head_leaves_over_are_empty(costs, num_stages, counts):
    assert share_out_from_front(costs, num_stages) == counts


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
    costs = LayerCosts(blocks=(1.0,) * 8, embedding=embedding, head=head)
    assert share_out_from_front(costs, num_stages) == counts


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
    costs = LayerCosts(blocks=(1.0,) * 8, embedding=embedding, head=head)
    assert share_out_by_threshold(costs, num_stages) == counts


def test_the_playbooks_8b_is_cut_in_two_at_18():
    """Half of 32 · 243 M + 537 M is reached in block 18; measured memory and MFU say so too."""
    model = replace(find_preset("llama3.1-8b"), num_kv_heads=32, vocab_size=131_072)
    block, head = count_block_parameters(model), count_embedding_parameters(model)
    costs = LayerCosts(blocks=(float(block),) * model.num_layers, head=float(head))
    assert share_out_by_threshold(costs, 2) == (18, 14)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), cost, cost, st.integers(1, 6))
def test_shares_by_threshold_are_complete_and_each_ends_no_later_than_it_must(blocks, embedding, head, num_stages):
    costs = LayerCosts(blocks=tuple(map(float, blocks)), embedding=float(embedding), head=float(head))
    counts = share_out_by_threshold(costs, num_stages)
    assert len(counts) == num_stages and min(counts) >= 0 and sum(counts) == len(blocks)
    share = (embedding + sum(blocks) + head) / num_stages
    for stage in range(num_stages - 1):
        end = sum(counts[: stage + 1])
        before_last = embedding + sum(blocks[: end - 1])
        assert counts[stage] < 2 or before_last < share * (stage + 1) * (1 + 1e-9)
