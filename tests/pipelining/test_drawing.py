"""A pipeline's timeline as text and as a trace."""

import pytest

from dtlayout.pipelining.drawing import draw, draw_transfers, to_trace
from dtlayout.pipelining.timeline import Timeline, Transfer
from dtlayout.pipelining.timing import play_spans
from dtlayout.schedules.fast_timing import StageTimes
from dtlayout.schedules.schedules import find_schedule


def play(name: str, v: int, m: int) -> Timeline:
    schedule = find_schedule(name)
    stages, splits = 2 * v, schedule.splits_backward
    times = StageTimes((1.0,) * stages, (2.0,) * stages, (0.0,) * (stages - 1), (1.0,) * stages * splits)
    return Timeline(play_spans(schedule, schedule.place(2, v), m, times))


@pytest.mark.parametrize(
    ("name", "v", "m", "rows"),
    [
        ("1f1b", 1, 2, ["FF..BB.BB", ".FBBFBB.."]),
        ("zb-h1", 1, 2, ["FF.IWIW", ".FIFIWW"]),
        ("zb-v", 2, 2, ["FF.fifiIwIwWW", ".FfFfiIiIwWwW"]),
    ],
)
def test_a_rank_is_a_row_and_its_later_stages_have_small_letters(name: str, v: int, m: int, rows: list[str]) -> None:
    assert draw(play(name, v, m), find_schedule(name).place(2, v), 1.0) == rows


def test_a_column_shows_what_fills_most_of_it() -> None:
    timeline = play("1f1b", 1, 2)
    for width in (4, 7, 11):
        rows = draw(timeline, find_schedule("1f1b").place(2, 1), timeline.total_s / width)
        assert [len(row) for row in rows] == [width, width]
    assert draw(timeline, find_schedule("1f1b").place(2, 1), timeline.total_s) == ["B", "B"]


def test_transfers_have_rows_of_their_own_and_may_overlap_in_a_trace() -> None:
    timeline = Timeline(
        play("1f1b", 1, 2).spans,
        ([Transfer("gather", -1.0, 2.0), Transfer("message", 1.0, 5.0)], [Transfer("reduce", 7.0, 9.0)]),
    )
    assert draw_transfers(timeline, 1.0) == ["ggmmm....", ".......rr"] and draw_transfers(play("1f1b", 1, 2), 1.0) == []
    events = [each for each in to_trace({"measured": timeline})["traceEvents"] if each.get("cat") == "transfer"]
    begun, ended = ([(e["pid"], e["id"], e["ts"]) for e in events if e["ph"] == phase] for phase in "be")
    assert begun == [(0, 0, -1e6), (0, 1, 1e6), (1, 0, 7e6)] and ended == [(0, 0, 2e6), (0, 1, 5e6), (1, 0, 9e6)]


def test_a_trace_has_each_action_once_in_microseconds() -> None:
    events = to_trace({"predicted": play("1f1b", 1, 2), "measured": play("zb-h1", 1, 2)})["traceEvents"]
    actions = {(each["pid"], each["name"]): (each["ts"], each["dur"]) for each in events if each["ph"] == "X"}
    assert len(actions) == 8 + 12 and actions[1, "1B0"] == (2e6, 2e6) and actions[0, "0F1"] == (1e6, 1e6)
    assert actions[3, "1I0"] == (2e6, 1e6)
    names = [f"pipeline rank {rank}, {name}" for name in ("predicted", "measured") for rank in (0, 1)]
    assert [each["args"]["name"] for each in events if each["ph"] == "M"] == names
