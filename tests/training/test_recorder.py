"""The recorder of a timeline on CUDA: its times are of events, and the host waits before a step and after it alone."""

import pytest

from dtlayout.schedules.actions import Action, Kind
from dtlayout.spec.layout import Layout
from dtlayout.training.timeline import TimelineRecorder

FORWARD, BACKWARD = Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)


@pytest.mark.usefixtures("one_rank")
def test_on_cuda_actions_lie_where_events_of_the_stream_say_and_nothing_waits_for_them(cuda):
    recorder = TimelineRecorder("cuda", Layout(), timeout_s=20)
    recorder.begin()
    marks_ms = [(FORWARD, 0.0), (BACKWARD, 250.0), (None, 1000.0)]
    for action, cuda.now_ms in marks_ms:
        recorder.before_action(action)
        if action is BACKWARD:
            with recorder.transfer("gather"):
                cuda.now_ms = 300.0
    assert cuda.done.count("the host waits for all") == 1, "before the step"
    timeline = recorder.gather()
    assert cuda.done.count("the host waits for all") == 2
    [spans], [[gather]] = timeline.spans, timeline.transfers
    assert [span.action for span in spans] == [FORWARD, BACKWARD]
    assert [time for span in spans for time in (span.start, span.end)] == pytest.approx([0, 0.25, 0.25, 1.0])
    assert (gather.name, gather.start, gather.end) == ("gather", pytest.approx(0.25), pytest.approx(0.3))


@pytest.mark.usefixtures("one_rank")
def test_a_rank_that_is_not_recorded_and_a_cpu_wait_for_nothing(cuda, monkeypatch):
    recorder = TimelineRecorder("cpu", Layout(), timeout_s=20)
    recorder.begin()
    for action in (FORWARD, None):
        recorder.before_action(action)
    [[span]] = recorder.gather().spans
    assert span.action == FORWARD and span.end > span.start == 0
    monkeypatch.setattr(recorder, "_pp_rank", None)
    recorder.begin()
    assert recorder.gather() is None and cuda.done == []
