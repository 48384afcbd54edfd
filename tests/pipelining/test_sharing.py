"""Ranks that share cores: as the exact timing where there are enough of them, and bounded by their work where not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlayout.pipelining.timing import time_pipeline, time_shared_pipeline
from dtlayout.schedules.fast_timing import StageTimes

SECONDS = st.floats(0.01, 1.0)


@st.composite
def pipelines(draw):
    """A schedule with its sizes and times."""
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b"]))
    p = draw(st.integers(2 if schedule == "interleaved-1f1b" else 1, 4))
    v = draw(st.integers(2, 3)) if schedule == "interleaved-1f1b" else 1
    m = p * draw(st.integers(1, 3)) if v > 1 else draw(st.integers(1, 8))

    def times(count: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(SECONDS, min_size=count, max_size=count)))

    return schedule, p, v, m, StageTimes(times(p * v), times(p * v), times(p * v - 1))


@given(pipelines())
def test_with_a_core_for_every_rank_nothing_is_shared(pipeline):
    schedule, p, v, m, times = pipeline
    shared, alone = time_shared_pipeline(schedule, p, v, m, times, at_once=p), time_pipeline(schedule, p, v, m, times)
    assert shared.total_s == pytest.approx(alone.total_s)
    assert shared.finished_s == pytest.approx(alone.finished_s)
    assert shared.busy_s == pytest.approx(alone.busy_s)


@given(pipelines(), st.floats(0.3, 3.5))
def test_sharing_costs_time_but_no_more_than_doing_all_in_turn(pipeline, at_once):
    schedule, p, v, m, times = pipeline
    shared, alone = time_shared_pipeline(schedule, p, v, m, times, at_once), time_pipeline(schedule, p, v, m, times)
    work_s = sum(alone.busy_s)
    # Messages go on while others work, so that what is done in turn waits for no more than all of them.
    in_turn_s = work_s / min(at_once, 1.0) + 2 * m * sum(times.message_s)
    assert max(alone.total_s, work_s / at_once) <= shared.total_s * (1 + 1e-9)
    assert shared.total_s <= in_turn_s * (1 + 1e-9)


def test_a_bubble_costs_little_where_cores_are_short():
    times = StageTimes((1.0,) * 4, (2.0,) * 4, (0.0,) * 3)
    apart, shared = time_pipeline("1f1b", 4, 1, 8, times), time_shared_pipeline("1f1b", 4, 1, 8, times, at_once=2)
    assert apart.total_s == 3 * (8 + 3)  # three of eleven slots are bubble
    assert shared.total_s < 1.15 * 4 * 8 * 3 / 2  # all the work on two cores, and little more
