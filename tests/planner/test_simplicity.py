"""Which layout is the simplest, and that it comes first among those that cannot be told apart."""

from types import SimpleNamespace

import pytest

from dtlayout.planner.simplicity import Complexity, put_simplest_first, without_idle_overlap
from dtlayout.spec.batch import Batch
from dtlayout.spec.layout import Layout

PP = {"pp": 2, "dp_shard": 4}


@pytest.mark.parametrize(
    ("simple", "other"),
    [
        (Layout(dp_shard=8, zero=3, recompute="full"), Layout(dp_shard=4, tp=2)),
        (Layout(dp_shard=8), Layout(dp_replicate=2, dp_shard=4)),
        (Layout(tp=8, recompute="full"), Layout(tp=8, tp_overlap=True)),
        (Layout(dp_shard=8, ep=8), Layout(dp_shard=8, ep=8, ep_dispatcher="deepep")),
        (Layout(dp_shard=8, zero=3), Layout(dp_shard=8, recompute="full")),
        (Layout(**PP, zero=2), Layout(**PP, schedule="interleaved-1f1b", virtual_stages=2)),
        (Layout(**PP), Layout(**PP, zero=2)),
        (Layout(dp_shard=4, tp=2), Layout(tp=8)),
    ],
)
def test_one_thing_less_is_simpler(simple, other):
    assert Complexity.of(simple) < Complexity.of(other)


def test_what_has_no_effect_makes_nothing_less_simple():
    idle = Layout(dp_shard=8, tp_overlap=True, ep_overlap=True, ep_dispatcher="deepep")
    assert Complexity.of(idle) == Complexity.of(Layout(dp_shard=8))


def test_the_simplest_of_the_leading_places_comes_first_and_the_others_keep_their_order():
    ranked = [SimpleNamespace(layout=each) for each in (Layout(pp=2, tp=4), Layout(tp=8), Layout(pp=8), Layout())]
    names = [[str(each.layout) for each in put_simplest_first(ranked, places)] for places in (1, 2, 4)]
    first, second, third, last = (str(each.layout) for each in ranked)
    assert names == [[first, second, third, last], [second, first, third, last], [last, first, second, third]]


def test_an_overlap_of_tokens_is_off_where_there_is_one_microbatch():
    layout = Layout(dp_shard=8, ep=8, ep_overlap=True)
    assert without_idle_overlap(layout, Batch(global_batch=16, seq_len=8)) is layout
    assert not without_idle_overlap(layout, Batch(global_batch=8, seq_len=8)).ep_overlap
