"""Orders of every schedule: complete, without deadlock for any p, m and v, with the bubble that they claim."""

from collections import defaultdict
from collections.abc import Iterator
from operator import add
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from dtlayout.pipelining.schedule import make_schedule
from dtlayout.pipelining.timing import (
    count_in_flight,
    find_ends,
    in_flight_peaks,
    play_actions,
    play_rounds,
    play_spans,
    simulate,
)
from dtlayout.schedules.actions import PASS_BACK, RELEASE, Action, Kind
from dtlayout.schedules.fast_timing import StageTimes
from dtlayout.schedules.placement import Placement
from dtlayout.schedules.schedules import SCHEDULES, PipelineSchedule, find_schedule
from dtlayout.spec.batch import Batch
from dtlayout.spec.layout import Layout

SPLIT = [name for name, schedule in SCHEDULES.items() if schedule.splits_backward]
UNITS = {Kind.FORWARD: 1.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0, Kind.BACKWARD: 2.0}


def sizes(schedule: PipelineSchedule, ranks: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """p, v and m that a schedule takes."""
    for p in ranks:
        for v in (1, 2, 3, 4):
            for m in (1, 2, p, p + 1, 2 * p, 3 * p - 1, 4 * p, 64):
                rounds = schedule.whole_rounds and m % p
                if schedule.takes(p, v) and m >= schedule.least_rounds * p and not rounds:
                    yield p, v, m


def bubble(orders: list[list[Action]], placement: Placement, m: int) -> float:
    """Time that the step takes beside a rank's own work, where each part of a microbatch on a rank takes 1/v."""
    spans = simulate(orders, placement, lambda action: UNITS[action.kind] / placement.virtual_stages)
    return max(span.end for rank in spans for span in rank) - 3.0 * m


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_microbatch_is_done_once_on_each_stage_and_nothing_waits_for_itself(name: str) -> None:
    schedule = find_schedule(name)
    for p, v, m in sizes(schedule, (1, 2, 3, 4, 6, 7, 8, 16)):
        placement = schedule.place(p, v)
        orders = schedule.orders(placement, m)
        simulate(orders, placement, lambda action: UNITS[action.kind])
        for rank, order in enumerate(orders):
            done = defaultdict[tuple[int, int], str](str)
            for action in order:
                done[action.stage, action.microbatch] += action.kind.value
            assert {*done} == {(stage, i) for stage in placement.stages_of(rank) for i in range(m)}
            assert {*done.values()} <= {"FB", "FIW"}, (p, v, m)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_bubbles_are_those_of_the_papers(p: int) -> None:
    """In units of a microbatch's forward on a rank, which its other two parts take too."""
    m = 4 * p
    found = {
        (name, v): bubble(schedule.orders(schedule.place(p, v), m), schedule.place(p, v), m)
        for name, schedule in SCHEDULES.items()
        for v in (1, 2, 4)
        if schedule.takes(p, v)
    }
    for v in (1, 2, 4):
        whole, split = ("1f1b", "zb-h1") if v == 1 else ("interleaved-1f1b", "interleaved-zb")
        assert found[whole, v] == pytest.approx(3 * (p - 1) / v) and found[split, v] == pytest.approx((p - 1) / v)
    assert found["looped-bfs", 4] == pytest.approx(found["interleaved-1f1b", 4])
    assert found["zb-v", 2] == found["dualpipe-v", 2] == pytest.approx((p - 1) / 2)  # the last rank starts so late
    assert found["zb-v", 2] < found["v-half", 2] < found["v-min", 2] < found["1f1b", 1] or p < 4
    assert max(found["v-half", 2], found["v-min", 2]) <= found["1f1b", 1]


@pytest.mark.parametrize("p", [2, 3, 4, 8, 16])
@pytest.mark.parametrize(
    ("name", "v", "most"),
    [
        *(("zb-h1", 1, lambda p: p), ("zb-v", 2, lambda p: 2 * p)),
        *(("v-half", 2, lambda p: p + 2), ("v-min", 2, lambda p: -(-2 * p // 3) + 2)),
        *(("dualpipe-v", 2, lambda p: 2 * p + 1), ("interleaved-zb", 2, lambda p: 3 * p - 1)),
    ],
)
def test_no_rank_holds_more_chunks_than_the_schedule_promises(p: int, name: str, v: int, most) -> None:
    """1F1B's first rank holds p microbatches, which are v·p chunks."""

    def largest(until: tuple[Kind, ...]) -> int:
        moments = (in_flight_peaks(name, p, v, 4 * p, rank, until) for rank in range(p))
        return max(sum(count * length for count, length in moment) for rank in moments for moment in rank)

    assert largest(PASS_BACK) <= largest(RELEASE) == most(p)


def torch_order(runtime: type, placement: Placement, m: int) -> list[list[Action]]:
    """Forwards and backwards of each rank in torch's schedule; what it overlaps follows each other."""

    def stage(index: int, rank: int) -> SimpleNamespace:
        return SimpleNamespace(
            stage_index=index, num_stages=placement.num_stages, group_size=placement.num_ranks, group_rank=rank,
            is_first=index == 0, is_last=index == placement.num_stages - 1, submod=None, has_backward=True,
        )  # fmt: skip

    order = runtime([stage(index, 0) for index in placement.stages_of(0)], m).pipeline_order
    actions = [
        [part for action in order[rank] if action is not None for part in action.sub_actions or (action,)]
        for rank in range(placement.num_ranks)
    ]
    kinds = {"FULL_BACKWARD": Kind.BACKWARD}
    return [
        [
            Action(
                kinds.get(a.computation_type.name) or Kind[a.computation_type.name], a.stage_index, a.microbatch_index
            )
            for a in rank
        ]
        for rank in actions
    ]


@pytest.mark.parametrize(("p", "rounds"), [(2, 2), (4, 2), (4, 3), (8, 2)])
@pytest.mark.parametrize("name", ["looped-bfs", "dualpipe-v"])
def test_orders_are_torchs_own(name: str, p: int, rounds: int) -> None:
    schedule = find_schedule(name)
    placement, m = schedule.place(p, 2), rounds * p
    runtime = {"looped-bfs": ScheduleLoopedBFS, "dualpipe-v": ScheduleDualPipeV}[name]
    found, wanted = schedule.orders(placement, m), torch_order(runtime, placement, m)
    if name == "looped-bfs":  # whose backwards begin with the last microbatch
        found = [
            [a._replace(microbatch=m - 1 - a.microbatch) if a.kind is Kind.BACKWARD else a for a in rank]
            for rank in found
        ]
    assert found == wanted


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize(
    ("name", "runtime"), [("interleaved-zb", ScheduleInterleavedZeroBubble), ("zb-v", ScheduleZBVZeroBubble)]
)
def test_bubbles_are_no_larger_than_torchs(name: str, runtime: type, p: int) -> None:
    schedule, m = find_schedule(name), 4 * p
    placement = schedule.place(p, 2)
    own = bubble(schedule.orders(placement, m), placement, m)
    assert own <= bubble(torch_order(runtime, placement, m), placement, m) + 1e-9


@pytest.mark.parametrize("name", SPLIT)
def test_gradients_of_inputs_are_sent_and_those_of_weights_are_not(name: str) -> None:
    v = find_schedule(name).least_virtual_stages
    schedule = make_schedule(Layout(pp=4, schedule=name, virtual_stages=v), Batch(global_batch=8, seq_len=8))
    for actions in schedule.ranks:
        for action in (a for a in actions if a.kind is Kind.SEND_BACKWARD):
            made = [a for a in actions if a.kind in PASS_BACK and a[1:] == action[1:]]
            assert len(made) == 1 and actions.index(made[0]) < actions.index(action)
    sends = sum(a.kind is Kind.SEND_BACKWARD for actions in schedule.ranks for a in actions)
    crossing = sum(schedule.placement.rank_of(s) != schedule.placement.rank_of(s + 1) for s in range(4 * v - 1))
    assert sends == 8 * crossing


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_long_step_takes_as_long_as_if_it_were_played_whole(data: st.DataObject) -> None:
    schedule = find_schedule(data.draw(st.sampled_from(SPLIT)))
    p, v = data.draw(st.sampled_from([2, 3, 4])), schedule.least_virtual_stages
    m = p * data.draw(st.integers(10, 24)) + (0 if schedule.whole_rounds else data.draw(st.integers(0, p - 1)))
    seconds = st.floats(0.5, 2.0)
    forward_s, inputs_s, weights_s = (tuple(data.draw(seconds) for _ in range(p * v)) for _ in range(3))
    message_s = (data.draw(st.floats(0.0, 0.3)),) * (p * v - 1)
    times = StageTimes(forward_s, tuple(map(add, inputs_s, weights_s)), message_s, weights_s)
    placement = schedule.place(p, v)
    assert play_rounds(schedule, placement, m, times) == pytest.approx(play_actions(schedule, placement, m, times))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_ends_are_to_the_bit_those_of_the_actions_with_their_starts(data: st.DataObject) -> None:
    schedule = find_schedule(data.draw(st.sampled_from(SPLIT)))
    p, v = data.draw(st.sampled_from([2, 3, 4])), schedule.least_virtual_stages
    m, seconds = p * data.draw(st.integers(2, 6)), st.floats(0.5, 2.0)
    forward_s, inputs_s, weights_s = (tuple(data.draw(seconds) for _ in range(p * v)) for _ in range(3))
    message_s = tuple(data.draw(st.floats(0.0, 0.3)) for _ in range(p * v - 1))
    times = StageTimes(forward_s, tuple(map(add, inputs_s, weights_s)), message_s, weights_s)
    placement = schedule.place(p, v)
    spans = play_spans(schedule, placement, m, times)
    ends = find_ends(schedule.orders(placement, m), placement, m, times)
    assert ends == [[span.end for span in rank] for rank in spans]


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("until", [RELEASE, PASS_BACK])
def test_a_short_step_holds_what_a_long_one_does(name: str, until: tuple[Kind, ...]) -> None:
    schedule = find_schedule(name)
    for p in (2, 3, 4, 8):
        placement, enough = schedule.place(p, schedule.least_virtual_stages), schedule.shorten(p, 2, 16 * p)
        for rank in range(p):
            short, long = (count_in_flight(schedule, placement, m, rank, until=until) for m in (enough, 16 * p))
            assert short == long
