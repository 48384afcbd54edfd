"""Timing: as the orders of schedule.py say, action by action; the textbook's formulas; skips that leave nothing out."""

from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from outside import LATE_WEIGHTS, V_GPIPE, registered
from pipeline_bound import lower_bound

from dtlayout.base.errors import InvalidConfig
from dtlayout.pipelining.timing import (
    Moment,
    PipelineTime,
    count_in_flight,
    in_flight_peaks,
    play_actions,
    simulate,
    time_pipeline,
    weigh_moments,
)
from dtlayout.schedules import fast_timing
from dtlayout.schedules.actions import Action, Kind
from dtlayout.schedules.fast_timing import StageTimes
from dtlayout.schedules.placement import Looped, Placement
from dtlayout.schedules.schedules import PipelineSchedule, find_schedule

Case = tuple[str, int, int, int]  # schedule, ranks, virtual stages, microbatches

NEAR_TIES = [1.0, 1.0 + 1e-13, 1.0 + 1e-10, 1.0 + 1e-8, 1.00001, 1.0001, 1.001, 1.01, 0.5, 2.0]


@st.composite
def cases(draw, most_microbatches: int = 200) -> Case:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b"]))
    p = draw(st.integers(1, 8))
    if name == "interleaved-1f1b":
        return name, p, draw(st.integers(1, 4)), p * draw(st.integers(1, most_microbatches // p))
    return name, p, 1, draw(st.integers(1, most_microbatches))


@st.composite
def stage_times(draw, num_stages: int) -> StageTimes:
    """Seconds of any size, or almost equal ones, the hardest to tell apart."""
    work, message = draw(
        st.sampled_from(
            [
                (st.floats(0.01, 10), st.floats(0, 5)),
                (st.floats(0.9, 1.1), st.floats(0, 0.1)),
                (st.sampled_from(NEAR_TIES), st.sampled_from([0.0, 1e-9, 1e-4, 0.5])),
                (st.integers(0, 3).map(float), st.integers(0, 2).map(float)),
            ]
        )
    )

    def seconds(each: st.SearchStrategy[float], count: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(each, min_size=count, max_size=count)))

    return StageTimes(seconds(work, num_stages), seconds(work, num_stages), seconds(message, num_stages - 1))


def equal_stages(num_stages: int, forward_s: float, backward_s: float, message_s: float = 0.0) -> StageTimes:
    return StageTimes((forward_s,) * num_stages, (backward_s,) * num_stages, (message_s,) * (num_stages - 1))


def orders_of(case: Case) -> list[list[Action]]:
    return find_schedule(case[0]).orders(place(case), case[3])


def place(case: Case) -> Placement:
    return find_schedule(case[0]).place(*case[1:3])


def play_every_action(case: Case, times: StageTimes) -> PipelineTime:
    """The definition: each rank does the next action of its order once its input is there."""
    _, p, v, _ = case
    orders = orders_of(case)
    end_of: dict[tuple[Kind, int, int], float] = {}
    place, free, busy = [0] * p, [0.0] * p, [0.0] * p
    while any(place[rank] < len(orders[rank]) for rank in range(p)):
        before = sum(place)
        for rank in range(p):
            for action in orders[rank][place[rank] :]:
                forward = action.kind is Kind.FORWARD
                source = action.stage + (-1 if forward else 1)
                ready = 0.0
                if 0 <= source < p * v:
                    if (action.kind, source, action.microbatch) not in end_of:
                        break
                    delay = times.message_s[min(source, action.stage)] if p > 1 else 0.0
                    ready = end_of[action.kind, source, action.microbatch] + delay
                seconds = (times.forward_s if forward else times.backward_s)[action.stage]
                free[rank] = max(free[rank], ready) + seconds
                busy[rank] += seconds
                end_of[action.kind, action.stage, action.microbatch] = free[rank]
                place[rank] += 1
        assert sum(place) > before, "the orders wait for themselves"
    return PipelineTime(max(end_of.values()), tuple(busy), tuple(free))


def play_every_wave(case: Case, times: StageTimes) -> PipelineTime:
    """What time_pipeline gives if it never skips a period."""
    with mock.patch.object(fast_timing, "TOLERANCE", -1.0):
        return time_pipeline(*case, times)


def count_waves(case: Case, times: StageTimes) -> int:
    """How many waves time_pipeline plays."""
    with (
        mock.patch.object(fast_timing, "_advance_1f1b", wraps=fast_timing._advance_1f1b) as of_1f1b,
        mock.patch.object(
            fast_timing, "_advance_interleaved", wraps=fast_timing._advance_interleaved
        ) as of_interleaved,
    ):
        time_pipeline(*case, times)
    return of_1f1b.call_count + of_interleaved.call_count


def assert_equal_times(actual: PipelineTime, expected: PipelineTime) -> None:
    assert actual.total_s == pytest.approx(expected.total_s, rel=1e-9, abs=1e-12)
    assert actual.busy_s == pytest.approx(expected.busy_s, rel=1e-9, abs=1e-12)
    assert actual.finished_s == pytest.approx(expected.finished_s, rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(cases(), st.data())
def test_times_are_those_of_every_action_of_the_orders(case, data):
    times = data.draw(stage_times(case[1] * case[2]))
    assert_equal_times(time_pipeline(*case, times), play_every_action(case, times))


@settings(deadline=None)
@given(cases(most_microbatches=60), st.data())
def test_without_messages_times_are_those_of_simulate(case, data):
    _, p, v, _ = case
    drawn = data.draw(stage_times(p * v))
    times = StageTimes(drawn.forward_s, drawn.backward_s, (0.0,) * (p * v - 1))

    def seconds(action: Action) -> float:
        return (times.forward_s if action.kind is Kind.FORWARD else times.backward_s)[action.stage]

    spans = simulate(orders_of(case), place(case), seconds)
    expected = PipelineTime(
        total_s=max(rank[-1].end for rank in spans),
        busy_s=tuple(sum(span.end - span.start for span in rank) for rank in spans),
        finished_s=tuple(rank[-1].end for rank in spans),
    )
    assert_equal_times(time_pipeline(*case, times), expected)


@settings(deadline=None)
@given(st.integers(2, 5), st.integers(1, 3), st.integers(1, 600), st.data())
def test_skipped_periods_leave_nothing_out_however_close_the_ties(p, v, rounds, data):
    times = data.draw(stage_times(p * v))
    case = ("1f1b", p, 1, rounds * 2) if v == 1 else ("interleaved-1f1b", p, v, rounds // 3 * p + p)
    assert_equal_times(time_pipeline(*case, times), play_every_wave(case, times))


def test_a_loop_that_takes_the_lead_late_is_not_missed():
    """The last stage, behind a long way, sets the pace for 5,005 microbatches, then the first, slower by 0.03 %."""
    times = StageTimes((1.001, *(0.5,) * 4, 1.0), (2.0, *(0.5,) * 4, 2.0), (0.0,) * 5)

    def growth(m: int) -> float:
        return time_pipeline("1f1b", 6, 1, m + 1, times).total_s - time_pipeline("1f1b", 6, 1, m, times).total_s

    assert growth(1_000) == pytest.approx(3.0, rel=1e-9)
    assert growth(10_000) == pytest.approx(3.001, rel=1e-9)
    for m in (1_000, 5_000, 5_010, 20_000):
        assert_equal_times(time_pipeline("1f1b", 6, 1, m, times), play_every_wave(("1f1b", 6, 1, m), times))


@given(st.integers(2, 8), st.integers(0, 50), st.sampled_from([0.0, 0.25, 1.0]))
def test_a_loop_through_all_ranks_repeats_every_p_waves_and_is_skipped_too(p, extra, message):
    """Each period of p microbatches takes p·(f + b) and the 2·(p - 1) messages of the way there and back."""
    times = equal_stages(p, 1.0, 2.0, message)
    long, longer = (10**6 * p + extra, (10**6 + 1) * p + extra)
    growth = time_pipeline("1f1b", p, 1, longer, times).total_s - time_pipeline("1f1b", p, 1, long, times).total_s
    assert growth == pytest.approx(3 * p + 2 * (p - 1) * message, abs=1e-6)
    assert count_waves(("1f1b", p, 1, long), times) < 20 * p


@pytest.mark.parametrize("schedule, v", [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2)])
def test_a_billion_microbatches_cost_no_more_than_a_few(schedule, v):
    case = (schedule, 4, v, 10**9)
    times = equal_stages(4 * v, 1.0, 2.0)
    assert time_pipeline(*case, times).total_s == 3e9 * v + 9
    assert count_waves(case, times) < 100


@settings(deadline=None)
@given(cases(), st.integers(1, 9), st.integers(1, 9))
def test_equal_stages_idle_as_long_as_the_papers_say(case, forward, backward):
    """(p - 1)·(f + b) of one chunk for every schedule: arXiv:2104.04473, sec. 2.2."""
    name, p, v, m = case
    assume(name != "interleaved-1f1b" or v > 1)  # with one chunk it only warms up for longer than it need
    times = equal_stages(p * v, forward, backward)
    time = time_pipeline(*case, times)
    assert time.busy_s == (m * v * (forward + backward),) * p
    assert time.total_s == (m * v + p - 1) * (forward + backward)
    assert lower_bound(*case, times) == time.total_s


@given(
    st.integers(2, 8), st.integers(1, 30), st.booleans(), st.integers(0, 40), st.integers(1, 9), st.integers(1, 9)
)  # fmt: skip
def test_the_bound_of_1f1b_knows_how_long_its_loops_wait_for_messages(p, rounds, more, message, forward, backward):
    """Exact where the last microbatch follows a whole number of ways around all ranks, or one more than these do."""
    times = equal_stages(p, forward, backward, message)
    around = p * (forward + backward) + 2 * (p - 1) * message
    case = "1f1b", p, 1, rounds * p + 1 + more
    expected = (rounds + 1) * around + more * (forward + backward)
    assert lower_bound(*case, times) == time_pipeline(*case, times).total_s == expected
    assert lower_bound(*case, replace(times, message_s=(0,) * (p - 1))) < expected or not message


@settings(max_examples=500)
@given(st.integers(1, 8), st.data())
def test_the_bound_of_1f1b_is_never_above_the_time_where_ranks_are_hardly_warm(p, data):
    m, times = data.draw(st.integers(1, 3 * p)), data.draw(stage_times(p))
    assert lower_bound("1f1b", p, 1, m, times) <= time_pipeline("1f1b", p, 1, m, times).total_s * (1 + 1e-9)


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 200), st.floats(0.01, 10), st.floats(0.01, 10))
def test_one_rank_never_waits(schedule, m, forward, backward):
    time = time_pipeline(schedule, 1, 1, m, equal_stages(1, forward, backward))
    expected = pytest.approx(m * (forward + backward))
    assert (time.total_s, time.busy_s, time.finished_s) == (expected, (expected,), (expected,))


@given(cases(), st.data())
def test_slower_messages_never_help(case, data):
    times = data.draw(stage_times(case[1] * case[2]))
    longer = tuple(seconds + data.draw(st.floats(0, 1)) for seconds in times.message_s)
    slower = time_pipeline(*case, StageTimes(times.forward_s, times.backward_s, longer))
    faster = time_pipeline(*case, times)
    assert slower.total_s >= faster.total_s * (1 - 1e-9)
    assert slower.busy_s == faster.busy_s


@given(cases(), st.data())
def test_the_lower_bound_is_never_above_the_time(case, data):
    times = data.draw(stage_times(case[1] * case[2]))
    time = time_pipeline(*case, times)
    assert max(time.busy_s) * (1 - 1e-12) <= lower_bound(*case, times) <= time.total_s * (1 + 1e-9)
    assert max(time.finished_s) == time.total_s


def spread(moment: Moment) -> tuple[int, ...]:
    """Microbatches of each chunk."""
    return tuple(count for count, length in moment for _ in range(length))


def walk_in_flight(case: Case) -> list[set[tuple[int, ...]]]:
    """For each rank all that it ever holds at one moment."""
    _, p, v, _ = case
    moments: list[set[tuple[int, ...]]] = []
    for order in orders_of(case):
        counts = [0] * v
        moments.append(set())
        for action in order:
            counts[action.stage // p] += 1 if action.kind is Kind.FORWARD else -1
            moments[-1].add(tuple(counts))
    return moments


@settings(deadline=None)
@given(cases(most_microbatches=60), st.data())
def test_peaks_hold_as_much_as_any_moment_whatever_a_chunk_takes(case, data):
    v = case[2]
    chunk_bytes = data.draw(st.lists(st.integers(0, 100), min_size=v, max_size=v))

    def held(counts: tuple[int, ...]) -> int:
        return sum(count * size for count, size in zip(counts, chunk_bytes, strict=True))

    for rank, moments in enumerate(walk_in_flight(case)):
        peaks = in_flight_peaks(*case, rank)
        assert set(map(spread, peaks)) <= moments
        assert weigh_moments(peaks, chunk_bytes) == [held(spread(peak)) for peak in peaks]
        assert max(weigh_moments(peaks, chunk_bytes)) == max(map(held, moments))


@settings(deadline=None)
@given(cases(most_microbatches=60), st.data())
def test_peaks_with_gradients_hold_as_much_as_any_moment_at_which_all_of_them_accumulate(case, data):
    name, p, v, m = case
    assume(v >= find_schedule(name).least_virtual_stages)
    chunk_bytes = data.draw(st.lists(st.integers(0, 100), min_size=v, max_size=v))
    for rank, order in enumerate(orders_of(case)):
        counts, num_done, moments = [0] * v, [0] * v, set()
        for action in order:
            chunk = action.stage // p
            counts[chunk] += 1 if action.kind is Kind.FORWARD else -1
            num_done[chunk] += action.kind is Kind.BACKWARD
            if all(0 < number < m for number in num_done):
                moments.add(tuple(counts))
        peaks = in_flight_peaks(*case, rank, with_gradients=True)
        if find_schedule(name).is_breadth_first:
            assert not peaks
            continue
        assert set(map(spread, peaks)) <= moments and bool(peaks) == bool(moments)
        most = [sum(count * size for count, size in zip(each, chunk_bytes, strict=True)) for each in moments]
        assert max(weigh_moments(peaks, chunk_bytes), default=0) == max(most, default=0)


@given(cases(most_microbatches=60))
def test_no_peak_is_below_another(case):
    for rank in range(case[1]):
        vectors = list(map(spread, in_flight_peaks(*case, rank)))
        assert len(set(vectors)) == len(vectors) <= case[2]
        for one in vectors:
            assert not any(one != other and all(x <= y for x, y in zip(one, other, strict=True)) for other in vectors)


def test_1f1b_holds_a_microbatch_for_each_rank_that_follows():
    assert [in_flight_peaks("1f1b", 4, 1, 3, rank) for rank in range(4)] == [(((n, 1),),) for n in (3, 3, 2, 1)]
    assert [in_flight_peaks("gpipe", 2, 1, 3, rank) for rank in range(2)] == [(((3, 1),),)] * 2


@pytest.mark.parametrize(
    "case, message",
    [
        (("1f1b", 2, 1, 0), "a pipeline of 2 ranks, 1 virtual stages and 0 microbatches does nothing"),
        (("1f1b", 2, 2, 2), "1f1b has at most 1 stages on each rank, not 2"),
        (("interleaved-1f1b", 2, 2, 3), "in rounds of 2 microbatches, which do not divide 3"),
    ],
)
def test_sizes_that_make_no_pipeline_are_refused(case, message):
    with pytest.raises(AssertionError, match=message):
        in_flight_peaks(*case, rank=0)
    with pytest.raises(AssertionError, match=message):
        time_pipeline(*case, equal_stages(4, 1.0, 2.0))


def test_times_for_another_number_of_stages_are_refused():
    message = r"3 stages take \(3, 3, 2\) forwards, backwards and messages, not \(2, 2, 1\)"
    with pytest.raises(AssertionError, match=message):
        time_pipeline("1f1b", 3, 1, 4, equal_stages(2, 1.0, 2.0))


def test_an_unknown_schedule_is_refused_with_the_known_ones():
    with pytest.raises(InvalidConfig, match=r"'zigzag' is unknown; use one of \['gpipe', '1f1b', 'interleaved-1f1b', "):
        time_pipeline("zigzag", 2, 1, 2, equal_stages(2, 1.0, 2.0))


# Playing actions, which is right for any schedule


@settings(deadline=None)
@given(cases(most_microbatches=60), st.data())
def test_a_fast_path_gives_what_playing_the_actions_gives(case, data):
    name, p, v, m = case
    schedule, times = find_schedule(name), data.draw(stage_times(p * v))
    ends = pytest.approx(play_actions(schedule, place(case), m, times), rel=1e-9, abs=1e-12)
    assert list(schedule.fast(p, v, m, times)) == ends
    sizes = data.draw(st.lists(st.integers(0, 100), min_size=v, max_size=v))
    for rank in range(p):
        played = count_in_flight(schedule, place(case), m, rank)
        assert max(weigh_moments(in_flight_peaks(*case, rank), sizes)) == max(weigh_moments(played, sizes))
        assert set(in_flight_peaks(*case, rank)) <= set(played)


@settings(deadline=None)
@given(st.integers(2, 5), st.integers(1, 12), st.data())
def test_stages_in_a_v_wait_for_no_message_where_it_turns(p, m, data):
    times = data.draw(stage_times(2 * p))
    with registered(V_GPIPE):
        time = time_pipeline("v-gpipe", p, 2, m, times)
        bound = lower_bound("v-gpipe", p, 2, m, times)
        free = list(times.message_s)
        free[p - 1] = 0.0
        again = time_pipeline("v-gpipe", p, 2, m, replace(times, message_s=tuple(free)))
        peaks = [in_flight_peaks("v-gpipe", p, 2, m, rank) for rank in range(p)]
    assert time == again
    assert max(time.busy_s) * (1 - 1e-12) <= bound <= time.total_s * (1 + 1e-9)
    assert time.busy_s[0] == pytest.approx(
        m * sum(s[stage] for s in (times.forward_s, times.backward_s) for stage in (0, 2 * p - 1))
    )
    assert peaks == [(((m, 2),),)] * p


def test_one_microbatch_takes_the_way_through_all_stages_and_their_messages():
    with registered(V_GPIPE):
        time = time_pipeline("v-gpipe", 2, 2, 1, equal_stages(4, 1.0, 2.0, message_s=0.5))
    assert time.total_s == 4 * 3.0 + 4 * 0.5  # of three hops one stays on its rank
    assert time.finished_s == (time.total_s, time.total_s - 2.5)


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(0, 10), st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_zero_bubble_h1_idles_as_its_paper_says_and_holds_what_1f1b_does(p, extra, forward, more, weight):
    """arXiv:2401.10241, table 2: (p - 1)·(F + B - W), p microbatches on every rank; there F <= B, and W no longer."""
    m, gradient = 2 * p + extra, forward + more
    weight = min(weight, forward)
    times = replace(equal_stages(p, forward, gradient + weight), backward_weight_s=(weight,) * p)
    with registered(LATE_WEIGHTS):
        time = time_pipeline("late-weights", p, 1, m, times)
        bound = lower_bound("late-weights", p, 1, m, times)
        peaks = [in_flight_peaks("late-weights", p, 1, m, rank) for rank in range(p)]
    assert max(time.busy_s) <= bound <= time.total_s
    assert time.total_s == m * (forward + gradient + weight) + (p - 1) * (forward + gradient - weight)
    assert peaks == [(((p, 1),),)] * p
    assert time.total_s <= time_pipeline("1f1b", p, 1, m, times).total_s


def test_gradients_of_weights_wait_for_those_of_inputs_and_nobody_waits_for_them():
    with registered(LATE_WEIGHTS):
        spans = simulate(LATE_WEIGHTS.orders(Looped(2), 2), Looped(2), lambda action: 1.0)
    assert [[f"{span.action}@{span.start:g}" for span in rank] for rank in spans] == [
        ["0F0@0", "0F1@1", "0I0@3", "0W0@4", "0I1@5", "0W1@6"],
        ["1F0@1", "1I0@2", "1F1@3", "1I1@4", "1W0@5", "1W1@6"],
    ]


def test_a_schedule_that_splits_backwards_takes_the_seconds_of_both_parts():
    with registered(LATE_WEIGHTS), pytest.raises(AssertionError, match="late-weights splits backwards in two"):
        time_pipeline("late-weights", 2, 1, 2, equal_stages(2, 1.0, 2.0))


def test_an_order_that_waits_for_itself_is_named():
    def backwards_first(placement: Placement, rank: int, m: int) -> list[Action]:
        return [Action(kind, rank, i) for kind in (Kind.BACKWARD, Kind.FORWARD) for i in range(m)]

    with (
        registered(PipelineSchedule(name="stuck", order=backwards_first)),
        pytest.raises(AssertionError, match="an order waits for itself, at 0B0, 1B0"),
    ):
        time_pipeline("stuck", 2, 1, 2, equal_stages(2, 1.0, 2.0))
