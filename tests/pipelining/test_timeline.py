"""A pipeline's timeline: its bubble, its JSON form, and which stage is slow."""

from collections.abc import Callable

import pytest

from dtlayout.pipelining.timeline import Timeline, Transfer, find_scales
from dtlayout.pipelining.timing import simulate
from dtlayout.schedules.actions import Action, Kind
from dtlayout.schedules.schedules import find_schedule


def play(name: str, p: int, v: int, m: int, slowness: Callable[[Action], float] = lambda action: 1.0) -> Timeline:
    """Forwards and backwards of 2 s each, or that many times as long."""
    schedule = find_schedule(name)
    placement = schedule.place(p, v)
    orders = schedule.orders(placement, m)
    return Timeline(simulate(orders, placement, lambda action: 2.0 * slowness(action)))


def test_the_bubble_is_what_the_busiest_rank_waits() -> None:
    timeline = play("1f1b", 4, 1, 4)
    assert timeline.total_s == 28.0 and timeline.waits_s == [12.0] * 4
    assert timeline.bubble == pytest.approx(12 / 28)
    uneven = play("1f1b", 4, 1, 4, lambda action: 1.0 + (action.stage == 2))
    assert uneven.bubble == uneven.waits_s[2] / uneven.total_s == min(uneven.waits_s) / uneven.total_s


def test_json_keeps_all_and_begins_at_zero() -> None:
    timeline = play("zb-v", 2, 2, 4)
    assert Timeline.of_rows(timeline.to_rows()) == timeline
    later = [[[name, start + 5, end + 5] for name, start, end in rank] for rank in timeline.to_rows()]
    assert Timeline.of_rows(later) == timeline
    transfers = [("gather", -0.5, 1.0)], []
    own = Timeline(timeline.spans, tuple([Transfer(*each) for each in rank] for rank in transfers))
    later_too = [[(name, start + 5, end + 5) for name, start, end in rank] for rank in transfers]
    assert Timeline.of_rows(own.to_rows(), own.transfers) == Timeline.of_rows(later, later_too) == own


@pytest.mark.parametrize(
    "rows", [[], [[]], [[["0X0", 0, 1]]], [[["0F0", 0]]], [[["0F0", "a", 1]]], [[["0SEND_F0", 0, 1]]]]
)
def test_what_is_no_timeline_is_refused(rows: list[list[list[object]]]) -> None:
    with pytest.raises(ValueError):
        Timeline.of_rows(rows)


@pytest.mark.parametrize("kinds", [(Kind.FORWARD,), (Kind.BACKWARD, Kind.BACKWARD_INPUT), tuple(Kind)])
@pytest.mark.parametrize(
    ("name", "p", "v"), [("1f1b", 2, 1), ("1f1b", 4, 1), ("interleaved-1f1b", 4, 2), ("zb-v", 4, 2)]
)
def test_a_slow_stage_is_named_and_no_other(name: str, p: int, v: int, kinds: tuple[Kind, ...]) -> None:
    """All take 1.3 times as long as predicted, and these kinds of stage 1 three times that."""
    predicted = play(name, p, v, 8)
    measured = play(name, p, v, 8, lambda a: 1.3 * (3 if a.stage == 1 and a.kind in kinds else 1))
    (slow,) = measured.find_slow_stages(predicted)
    parts = {span.action.kind for rank in predicted.spans for span in rank}
    expected_s = 1.3 * 2 * len(parts)
    planted_s = 2 * 1.3 * 2 * len(parts.intersection(kinds))
    assert slow == pytest.approx((1, 1, expected_s + planted_s, expected_s))


def test_what_is_slow_everywhere_is_no_stages_fault() -> None:
    predicted = play("1f1b", 4, 1, 8)
    assert play("1f1b", 4, 1, 8, lambda action: 3.0).find_slow_stages(predicted) == []
    assert play("1f1b", 4, 1, 8, lambda action: 1.0 + 0.05 * action.stage).find_slow_stages(predicted) == []
    assert play("1f1b", 1, 1, 8, lambda action: 3.0).find_slow_stages(play("1f1b", 1, 1, 8)) == []


def test_what_could_not_be_seen_has_a_scale_of_its_own() -> None:
    long, half, short = play("1f1b", 2, 1, 40), play("1f1b", 2, 1, 20), play("1f1b", 2, 1, 4)
    assert find_scales({"a": half, "b": long}) == {"a": long.total_s, "b": long.total_s}
    assert find_scales({"a": short, "b": long}) == {"a": short.total_s, "b": long.total_s}
