"""Schedules: the orders are torch's own, nothing waits for itself, and simulated times are the textbook's."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from dtlayout.pipelining.schedule import Schedule, make_schedule
from dtlayout.pipelining.timing import simulate
from dtlayout.schedules.actions import Action, Kind
from dtlayout.schedules.placement import Looped, Placement
from dtlayout.spec.batch import Batch
from dtlayout.spec.layout import Layout

COMPUTE = (Kind.FORWARD, Kind.BACKWARD)


class Deadlock(Exception):
    """Every rank that has work left waits."""


def schedule_of(name: str, p: int, v: int, m: int) -> Schedule:
    return make_schedule(
        Layout(pp=p, virtual_stages=v, schedule=name, micro_batch=2), Batch(global_batch=2 * m, seq_len=8)
    )


@st.composite
def schedules(draw) -> Schedule:
    """Any legal schedule of up to 6 ranks."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b"]))
    if name == "interleaved-1f1b":
        p = draw(st.integers(2, 5))
        return schedule_of(name, p, draw(st.integers(2, 4)), p * draw(st.integers(1, 4)))
    p = draw(st.integers(1, 6))
    return schedule_of(name, p, 1, draw(st.integers(p if name == "1f1b" else 1, 14)))


def orders_of(schedule: Schedule) -> list[list[Action]]:
    return [schedule.compute_actions(rank) for rank in range(len(schedule.ranks))]


def execute(ranks: Sequence[Sequence[Action]], placement: Placement) -> list[Action]:
    """Run the lists front to back; a message happens when both its ends are next on their ranks, and blocks until then.

    Gives the actions in the order in which they happened. Fails if work starts without its input, if two ends that
    meet belong to different messages, or if nothing can go on.
    """
    place = [0] * len(ranks)
    arrived: set[Action] = set()  # what a rank has at hand: its receives and its own work
    done: list[Action] = []

    def head(rank: int) -> Action | None:
        return ranks[rank][place[rank]] if place[rank] < len(ranks[rank]) else None

    def finish(rank: int) -> None:
        done.append(ranks[rank][place[rank]])
        arrived.add(done[-1])
        place[rank] += 1

    progress = True
    while progress:
        progress = False
        for rank in range(len(ranks)):
            while (action := head(rank)) is not None and action.kind in COMPUTE:
                assert inputs_of(action, placement) <= arrived, f"{action} starts without its input"
                finish(rank)
                progress = True
            if action is None or action.kind not in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                continue
            assert work_sent_by(action) in arrived, f"{action} sends what is not there"
            forward = action.kind is Kind.SEND_FORWARD
            receive = Action(
                Kind.RECEIVE_FORWARD if forward else Kind.RECEIVE_BACKWARD,
                action.stage + (1 if forward else -1),
                action.microbatch,
            )
            peer = placement.rank_of(receive.stage)
            if head(peer) == receive:
                finish(rank)
                finish(peer)
                progress = True
    if any(head(rank) is not None for rank in range(len(ranks))):
        raise Deadlock(", ".join(f"rank {rank} waits at {head(rank)}" for rank in range(len(ranks))))
    return done


def inputs_of(action: Action, placement: Placement) -> set[Action]:
    """What must be on the rank before an action starts."""
    stage, i = action.stage, action.microbatch

    def comes_from(kind: Kind, source: int, receive: Kind) -> Action:
        is_here = placement.rank_of(source) == placement.rank_of(stage)
        return Action(kind, source, i) if is_here else Action(receive, stage, i)

    if action.kind is Kind.FORWARD:
        return {comes_from(Kind.FORWARD, stage - 1, Kind.RECEIVE_FORWARD)} if stage else set()
    needed = {Action(Kind.FORWARD, stage, i)}
    if stage == placement.num_stages - 1:
        return needed
    return needed | {comes_from(Kind.BACKWARD, stage + 1, Kind.RECEIVE_BACKWARD)}


def work_sent_by(action: Action) -> Action:
    kind = Kind.FORWARD if action.kind is Kind.SEND_FORWARD else Kind.BACKWARD
    return Action(kind, action.stage, action.microbatch)


def recording_stage(stage: int, num_stages: int, num_ranks: int, done: list[str]) -> SimpleNamespace:
    """Stands for a pipeline stage under torch's runtimes; what they do with it goes to `done`, messages do nothing."""
    messages = ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops")
    return SimpleNamespace(
        stage_index=stage, num_stages=num_stages, group_size=num_ranks, group_rank=0, is_last=False, submod=None,
        forward_one_chunk=lambda i, *_, **__: done.append(f"{stage}F{i}"),
        backward_one_chunk=lambda i, **_: done.append(f"{stage}B{i}"),
        perform_reduce_grad=lambda _: None,
        release_fwd_send_outputs=lambda _: None,
        **dict.fromkeys(messages, lambda i: []),
    )  # fmt: skip


def run_in_torch(runtime: type, rank: int, p: int, m: int) -> list[str]:
    """What torch's single-stage runtime does on one rank. (The list of Schedule1F1B.pipeline_order is not what it does:
    on the last rank that list begins with microbatch 1.)"""
    done: list[str] = []
    schedule = runtime(recording_stage(rank, p, p, done), m)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches()
    return done


def order_in_torch(name: str, p: int, v: int, m: int) -> list[list[str]]:
    """The forwards and backwards of each rank in torch's schedule of that name."""
    if name == "interleaved-1f1b":
        order = ScheduleInterleaved1F1B(
            [recording_stage(s, p * v, p, []) for s in range(0, p * v, p)], m
        ).pipeline_order
        return [[str(action) for action in order[rank] if action is not None] for rank in range(p)]
    return [run_in_torch({"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name], rank, p, m) for rank in range(p)]


@settings(deadline=None)
@given(schedules())
def test_every_rank_computes_in_torchs_order(schedule):
    p = schedule.placement.num_ranks
    expected = order_in_torch(schedule.name, p, schedule.placement.virtual_stages, schedule.num_microbatches)
    assert [[str(a) for a in order] for order in orders_of(schedule)] == expected


def test_interleaved_1f1b_prints_the_figure_of_the_paper():
    assert str(schedule_of("interleaved-1f1b", 2, 2, 4)).splitlines()[1] == (
        "rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    )


@given(schedules())
def test_every_stage_does_every_microbatch_forward_and_backward_once_on_its_rank(schedule):
    for rank, order in enumerate(orders_of(schedule)):
        assert all(schedule.placement.rank_of(stage) == rank for stage in schedule.placement.stages_of(rank))
        expected = {
            Action(kind, stage, i)
            for kind in COMPUTE
            for stage in schedule.placement.stages_of(rank)
            for i in range(schedule.num_microbatches)
        }
        assert len(order) == len(expected)
        assert set(order) == expected
    assert sorted(s for r in range(schedule.placement.num_ranks) for s in schedule.placement.stages_of(r)) == list(
        range(schedule.placement.num_stages)
    )


@given(schedules())
def test_microbatches_in_flight_are_bounded_as_the_papers_say(schedule):
    p, v, m = schedule.placement.num_ranks, schedule.placement.virtual_stages, schedule.num_microbatches
    for rank, order in enumerate(orders_of(schedule)):
        in_flight, most = 0, 0
        for action in order:
            in_flight += 1 if action.kind is Kind.FORWARD else -1
            most = max(most, in_flight)
        bound = {
            "gpipe": m,
            "1f1b": min(p - rank, m),
            "interleaved-1f1b": min((v - 1) * p + 2 * (p - 1 - rank) + 1, m * v),
        }
        assert most == bound[schedule.name]
        assert in_flight == 0


@given(schedules())
def test_every_message_has_two_ends_on_neighbouring_ranks(schedule):
    messages = Counter(a for rank in schedule.ranks for a in rank if a.kind not in COMPUTE)
    expected = Counter()
    for stage in range(schedule.placement.num_stages - 1):
        for i in range(schedule.num_microbatches):
            expected.update([Action(Kind.SEND_FORWARD, stage, i), Action(Kind.RECEIVE_FORWARD, stage + 1, i)])
            expected.update([Action(Kind.SEND_BACKWARD, stage + 1, i), Action(Kind.RECEIVE_BACKWARD, stage, i)])
    assert messages == expected
    for rank, actions in enumerate(schedule.ranks):
        assert {schedule.placement.rank_of(a.stage) for a in actions} == {rank}


@given(schedules())
def test_messages_that_block_until_they_meet_never_deadlock(schedule):
    done = execute(schedule.ranks, schedule.placement)
    assert len(done) == sum(map(len, schedule.ranks))


def test_the_executor_sees_two_ranks_that_send_to_each_other_first():
    ranks = [list(rank) for rank in schedule_of("1f1b", 2, 1, 3).ranks]
    send = ranks[0].index(Action(Kind.SEND_FORWARD, 0, 1))
    receive = ranks[0].index(Action(Kind.RECEIVE_BACKWARD, 0, 0))
    ranks[0][send], ranks[0][receive] = ranks[0][receive], ranks[0][send]
    with pytest.raises(Deadlock, match="rank 0 waits at 0RECV_B0, rank 1 waits at 1RECV_F1"):
        execute(ranks, Looped(2))


def test_the_executor_sees_work_that_starts_before_its_input():
    ranks = [list(rank) for rank in schedule_of("1f1b", 2, 1, 2).ranks]
    ranks[1].remove(Action(Kind.FORWARD, 1, 0))
    ranks[1].insert(0, Action(Kind.FORWARD, 1, 0))
    with pytest.raises(AssertionError, match="1F0 starts without its input"):
        execute(ranks, Looped(2))


@given(schedules())
def test_a_message_leaves_when_its_work_ends(schedule):
    """So no rank holds results back: between a forward and its send there are other messages at most."""
    for actions in schedule.ranks:
        last_work = None
        for action in actions:
            if action.kind in COMPUTE:
                last_work = action
            elif action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                assert work_sent_by(action) == last_work


def makespan(schedule: Schedule, duration) -> float:
    return max(span.end for rank in simulate(orders_of(schedule), schedule.placement, duration) for span in rank)


@given(st.integers(1, 6), st.integers(0, 8), st.integers(1, 5), st.integers(1, 5))
def test_1f1b_and_gpipe_with_equal_stages_idle_for_p_minus_1_of_m_plus_p_minus_1(p, extra, forward, backward):
    m = p + extra
    for name in ("1f1b", "gpipe"):
        schedule = schedule_of(name, p, 1, m)
        spans = simulate(
            orders_of(schedule), schedule.placement, lambda a: forward if a.kind is Kind.FORWARD else backward
        )
        step = max(span.end for rank in spans for span in rank)
        assert step == (m + p - 1) * (forward + backward)
        for rank in spans:
            busy = sum(span.end - span.start for span in rank)
            assert 1 - busy / step == pytest.approx((p - 1) / (m + p - 1))


@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 4), st.integers(1, 3))
def test_interleaving_divides_the_bubble_by_the_virtual_stages(p, v, rounds, forward):
    m = p * rounds
    schedule = schedule_of("interleaved-1f1b", p, v, m)
    work, bubble = m * v * 3 * forward, (p - 1) * 3 * forward  # arXiv:2104.04473, sec. 2.2: t_pb / v, in chunks
    assert makespan(schedule, lambda a: forward if a.kind is Kind.FORWARD else 2 * forward) == work + bubble


@given(st.integers(2, 5), st.integers(1, 8), st.data())
def test_the_slowest_stage_sets_the_pace_of_1f1b(p, extra, data):
    costs = data.draw(st.lists(st.integers(1, 9), min_size=p, max_size=p))

    def duration(action: Action) -> float:
        return costs[action.stage] * (1 if action.kind is Kind.FORWARD else 2)

    m = (
        10 * p + extra
    )  # until then a stage that is nearly as slow may still be ahead, by up to nine microbatches a rank
    times = [makespan(schedule_of("1f1b", p, 1, n), duration) for n in (m, m + 1)]
    assert times[1] - times[0] == 3 * max(costs)


@given(schedules())
def test_simulated_work_never_overlaps_on_a_rank_nor_precedes_its_input(schedule):
    spans = simulate(orders_of(schedule), schedule.placement, lambda a: 1 + a.stage % 3 + a.microbatch % 2)
    end = {span.action: span.end for rank in spans for span in rank}
    for number, rank in enumerate(spans):
        assert [span.action for span in rank] == schedule.compute_actions(number)
        assert all(span.rank == number for span in rank)
        for before, span in pairwise(rank):
            assert before.end <= span.start
        for span in rank:
            a = span.action
            if a.kind is Kind.BACKWARD:
                assert end[Action(Kind.FORWARD, a.stage, a.microbatch)] <= span.start
            neighbour = Action(a.kind, a.stage + (-1 if a.kind is Kind.FORWARD else 1), a.microbatch)
            assert end.get(neighbour, 0) <= span.start


def test_simulate_refuses_an_order_that_waits_for_itself():
    order = [Action(Kind.BACKWARD, 0, 0), Action(Kind.FORWARD, 0, 0)]
    with pytest.raises(AssertionError, match="an order waits for itself"):
        simulate([order], Looped(1), lambda a: 1.0)
