"""Communicators that open before the first step: all of them, on all ranks, in an order without a circle."""

from training_ranks import opened_communicators

from dtlayout.mesh.opening import _list_neighbours
from dtlayout.spec.layout import Layout


def test_every_axis_and_every_pair_of_neighbours_is_opened_once(ranks4):
    layouts = [Layout(pp=2, tp=2), Layout(pp=4), Layout(dp_shard=2, cp=2), Layout(dp_shard=4)]
    by_rank = ranks4.run(opened_communicators, layouts)
    assert [found[0] for found in by_rank] == [["job", "pp", "tp", f"pp {1 - rank // 2}"] for rank in range(4)]
    assert by_rank[1][1] == ["job", "pp 0", "pp 2"] and by_rank[0][1] == ["job", "pp 1", "pp 3"], "the job is the axis"
    assert by_rank[0][2] == ["job", "dp_shard", "cp"], "both together are the job"
    assert all(found[3] == ["job"] for found in by_rank)


def test_each_pair_has_one_that_sends_and_one_that_receives():
    for size in range(1, 9):
        by_rank = [[*_list_neighbours(rank, size)] for rank in range(size)]
        for rank, pairs in enumerate(by_rank):
            assert all((rank, not sends) in by_rank[peer] for peer, sends in pairs)
            assert len(pairs) == (0 if size == 1 else 1 if size == 2 else 2)
