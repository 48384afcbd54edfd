"""Timing: as the orders of schedule.py say, action by action; the textbook's formulas; skips that leave nothing out."""

from unittest import mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dtlayout.pipelining import timing
from dtlayout.pipelining.schedule import Action, Kind, make_orders, simulate
from dtlayout.pipelining.timing import PipelineTime, StageTimes, in_flight_peaks, lower_bound, time_pipeline

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


def play_every_action(case: Case, times: StageTimes) -> PipelineTime:
    """The definition: each rank does the next action of its order once its input is there."""
    name, p, v, m = case
    orders = make_orders(name, p, v, m)
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
                    delay = times.message_s[min(source, action.stage)]
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
    with mock.patch.object(timing, "_TOLERANCE", -1.0):
        return time_pipeline(*case, times)


def count_waves(case: Case, times: StageTimes) -> int:
    """How many waves time_pipeline plays."""
    with (
        mock.patch.object(timing, "_advance_1f1b", wraps=timing._advance_1f1b) as of_1f1b,
        mock.patch.object(timing, "_advance_interleaved", wraps=timing._advance_interleaved) as of_interleaved,
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
    name, p, v, m = case
    drawn = data.draw(stage_times(p * v))
    times = StageTimes(drawn.forward_s, drawn.backward_s, (0.0,) * (p * v - 1))

    def seconds(action: Action) -> float:
        return (times.forward_s if action.kind is Kind.FORWARD else times.backward_s)[action.stage]

    spans = simulate(make_orders(name, p, v, m), p * v, seconds)
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


def walk_in_flight(case: Case) -> list[set[tuple[int, ...]]]:
    """For each rank all that it ever holds at one moment."""
    name, p, v, m = case
    moments: list[set[tuple[int, ...]]] = []
    for order in make_orders(name, p, v, m):
        counts = [0] * v
        moments.append(set())
        for action in order:
            counts[action.stage // p] += 1 if action.kind is Kind.FORWARD else -1
            moments[-1].add(tuple(counts))
    return moments


@settings(deadline=None)
@given(cases(most_microbatches=60), st.data())
def test_peaks_hold_as_much_as_any_moment_whatever_a_chunk_takes(case, data):
    p, v = case[1:3]
    chunk_bytes = data.draw(st.lists(st.integers(0, 100), min_size=v, max_size=v))

    def held(counts: tuple[int, ...]) -> int:
        return sum(count * size for count, size in zip(counts, chunk_bytes, strict=True))

    peaks = in_flight_peaks(*case)
    assert len(peaks) == p
    for vectors, moments in zip(peaks, walk_in_flight(case), strict=True):
        assert set(vectors) <= moments
        assert max(map(held, vectors)) == max(map(held, moments))


@given(cases(most_microbatches=60))
def test_no_peak_is_below_another(case):
    for vectors in in_flight_peaks(*case):
        assert len(set(vectors)) == len(vectors) <= case[2]
        for one in vectors:
            assert not any(one != other and all(x <= y for x, y in zip(one, other, strict=True)) for other in vectors)


def test_1f1b_holds_a_microbatch_for_each_rank_that_follows():
    assert in_flight_peaks("1f1b", 4, 1, 3) == (((3,),), ((3,),), ((2,),), ((1,),))
    assert in_flight_peaks("gpipe", 2, 1, 3) == (((3,),), ((3,),))


@pytest.mark.parametrize(
    "case, message",
    [
        (("zigzag", 2, 1, 2), "zigzag is no schedule; one of gpipe, 1f1b, interleaved-1f1b"),
        (("1f1b", 2, 1, 0), "a pipeline of 2 ranks, 1 virtual stages and 0 microbatches does nothing"),
        (("1f1b", 2, 2, 2), "1f1b has one stage on each rank, not 2"),
        (("interleaved-1f1b", 2, 2, 3), "in rounds of 2 microbatches, which do not divide 3"),
    ],
)
def test_sizes_that_make_no_pipeline_are_refused(case, message):
    with pytest.raises(AssertionError, match=message):
        in_flight_peaks(*case)
    with pytest.raises(AssertionError, match=message):
        time_pipeline(*case, equal_stages(4, 1.0, 2.0))


@pytest.mark.parametrize("function", [time_pipeline, lower_bound])
def test_times_for_another_number_of_stages_are_refused(function):
    message = r"3 stages take \(3, 3, 2\) forwards, backwards and messages, not \(2, 2, 1\)"
    with pytest.raises(AssertionError, match=message):
        function("1f1b", 3, 1, 4, equal_stages(2, 1.0, 2.0))
