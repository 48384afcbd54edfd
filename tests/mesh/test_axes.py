"""Rank ↔ coordinate: a bijection, whose groups partition the world."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlayout.mesh.axes import axis_sizes, axis_strides, coordinate, crosses_node, dp_rank, ranks_along
from dtlayout.spec.layout import Layout
from dtlayout.spec.layout_keys import AXES

size = st.integers(1, 4)
layouts = st.builds(Layout, pp=size, dp_replicate=size, dp_shard=size, cp=st.integers(1, 2), tp=size)
axes = st.sampled_from(AXES)


@given(layouts)
def test_every_rank_has_its_own_coordinate_inside_the_mesh(layout):
    sizes, strides = axis_sizes(layout), axis_strides(layout)
    for rank in range(layout.world_size):
        place = coordinate(rank, layout)
        assert list(place) == list(AXES)
        assert all(0 <= place[axis] < sizes[axis] for axis in AXES)
        assert sum(place[axis] * strides[axis] for axis in AXES) == rank


@given(layouts)
def test_ranks_count_up_along_the_innermost_axis_first(layout):
    places = [tuple(coordinate(rank, layout).values()) for rank in range(layout.world_size)]
    assert places == sorted(places)


@given(layouts, axes)
def test_the_groups_along_an_axis_partition_the_world(layout, axis):
    groups = {tuple(ranks_along(axis, rank, layout)) for rank in range(layout.world_size)}
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {axis_sizes(layout)[axis]}


@given(layouts, axes, st.data())
def test_the_members_of_a_group_differ_on_its_axis_alone(layout, axis, data):
    rank = data.draw(st.integers(0, layout.world_size - 1))
    group = ranks_along(axis, rank, layout)
    assert rank in group
    for place, member in enumerate(group):
        assert coordinate(member, layout) == {**coordinate(rank, layout), axis: place}


@given(layouts)
def test_ranks_that_read_the_same_share_differ_only_where_the_model_is_split(layout):
    shares = [dp_rank(rank, layout) for rank in range(layout.world_size)]
    assert sorted(set(shares)) == list(range(layout.dp))
    for rank, share in enumerate(shares):
        for axis in ("pp", "cp", "tp"):
            assert {shares[other] for other in ranks_along(axis, rank, layout)} == {share}


@given(layouts, axes, st.integers(1, 16))
def test_an_axis_crosses_nodes_when_one_of_its_groups_does(layout, axis, gpus_per_node):
    nodes = [{r // gpus_per_node for r in ranks_along(axis, rank, layout)} for rank in range(layout.world_size)]
    assert crosses_node(axis, layout, gpus_per_node) == any(len(group) > 1 for group in nodes)


@pytest.mark.parametrize(("axis", "crosses"), [("tp", False), ("dp_shard", True), ("pp", True), ("cp", False)])
def test_tp_stays_inside_a_node_of_its_size_and_the_outer_axes_leave_it(axis, crosses):
    assert crosses_node(axis, Layout(pp=2, dp_shard=4, tp=8), gpus_per_node=8) == crosses


def test_a_tp_group_that_does_not_divide_a_node_crosses_it():
    assert crosses_node("tp", Layout(dp_shard=4, tp=3), gpus_per_node=4)
