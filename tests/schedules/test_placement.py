"""Placements: every stage on one rank, laps that pass all of them, and messages only between ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlayout.schedules.actions import Result
from dtlayout.schedules.placement import Looped, Placement, VShaped

placements = st.builds(Looped, st.integers(1, 9), st.integers(1, 5)) | st.builds(
    VShaped, st.integers(1, 9), st.integers(1, 5)
)


@given(placements)
def test_every_stage_lies_on_one_rank_where_its_chunk_says(placement: Placement):
    p, v = placement.num_ranks, placement.virtual_stages
    places = {(placement.rank_of(stage), placement.chunk_of(stage)): stage for stage in range(placement.num_stages)}
    assert set(places) == {(rank, chunk) for rank in range(p) for chunk in range(v)}
    for rank in range(p):
        assert list(placement.stages_of(rank)) == [places[rank, chunk] for chunk in range(v)]
        assert placement.take(range(100, 200), rank) == tuple(100 + places[rank, chunk] for chunk in range(v))


@given(placements)
def test_the_first_lap_goes_down_the_ranks_in_order(placement: Placement):
    assert [placement.rank_of(stage) for stage in range(placement.num_ranks)] == list(range(placement.num_ranks))


@given(placements, st.data())
def test_a_result_goes_to_the_rank_of_the_next_stage_if_that_is_another(placement: Placement, data):
    stage, is_gradient = data.draw(st.integers(0, placement.num_stages - 1)), data.draw(st.booleans())
    following = stage - 1 if is_gradient else stage + 1
    receiver = placement.receiver_of(Result(is_gradient, stage, 0))
    if 0 <= following < placement.num_stages and placement.rank_of(following) != placement.rank_of(stage):
        assert receiver == placement.rank_of(following)
    else:
        assert receiver is None


@pytest.mark.parametrize(
    ("placement", "ranks"),
    [(Looped(3, 2), [0, 1, 2, 0, 1, 2]), (VShaped(3, 2), [0, 1, 2, 2, 1, 0]), (VShaped(2, 3), [0, 1, 1, 0, 0, 1])],
)
def test_a_loop_starts_again_and_a_v_turns(placement: Placement, ranks: list[int]):
    assert [placement.rank_of(stage) for stage in range(placement.num_stages)] == ranks


def test_placements_are_values():
    assert Looped(2, 2) == Looped(2, 2) != VShaped(2, 2)
    assert len({Looped(2, 2), Looped(2, 2), VShaped(2, 2)}) == 2
