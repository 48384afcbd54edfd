"""A recorded step of four ranks: its order, its bubble, and the stage that was made slow."""

import json
import re
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from launching import launch
from parity import FP32, SHAPE, Case, build_step, local_rows
from tiny import ROOT, write_tiny

from dtlayout.cli import main
from dtlayout.schedules.schedules import find_schedule
from dtlayout.spec.layout import Layout
from dtlayout.training.metrics import RecordedTimelines
from dtlayout.training.timeline import TimelineRecorder

PLANTED_S, USUAL_S = 0.2, 0.06
SLOW = f"""
import os, time
from dtlayout.training.timeline import TimelineRecorder

after_input = TimelineRecorder.after_input

def after_input_slowly(recorder):
    after_input(recorder)
    time.sleep({PLANTED_S} if os.environ["RANK"] == "2" else {USUAL_S})

TimelineRecorder.after_input = after_input_slowly
"""
"""A plugin: the third of four stages takes longer for each forward and each backward that has an input.

The others take a time beside which it does not matter how busy the machine is.
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The folder of a run of five steps."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "slow.py").write_text(SLOW)
    files, log = write_tiny(folder, steps=5), folder / "log"
    options = ("--layout.pp=4", "--layout.schedule=zb-h1", "--metrics.timeline=true", "--metrics.memory_every=2")
    environment = {"DTLAYOUT_PLUGINS": "slow", "PYTHONPATH": f"{ROOT}:{folder}"}
    assert launch(4, files.config, *options, log=log, **environment) == 0, log.read_text()
    return files.run


def test_recorded_are_the_schedules_actions_on_one_clock(recorded):
    timelines = RecordedTimelines.read(recorded)
    assert list(timelines.steps) == [3, 5]
    layout = timelines.run.layout
    schedule = find_schedule("zb-h1")
    m = layout.num_microbatches(timelines.run.scenario.batch)
    for timeline in timelines.steps.values():
        assert [[span.action for span in rank] for rank in timeline.spans] == schedule.orders(layout.placement, m)
        began = {str(span.action): span.start for rank in timeline.spans for span in rank}
        ended = {str(span.action): span.end for rank in timeline.spans for span in rank}
        for i in range(m):
            for stage in range(3):
                assert ended[f"{stage}F{i}"] <= began[f"{stage + 1}F{i}"]
                assert ended[f"{stage + 1}I{i}"] <= began[f"{stage}I{i}"]
        for rank in timeline.spans:
            assert all(a.start < a.end <= b.start < b.end for a, b in pairwise(rank))
        assert timeline.waits_s[2] == min(timeline.waits_s)
        assert timeline.stage_s()[2] > 2 * PLANTED_S


def test_a_message_is_on_its_way_until_it_is_used(recorded):
    """In the middle of the pipeline some are asked for before what the rank does before their use."""
    for timeline in RecordedTimelines.read(recorded).steps.values():
        for rank, (spans, transfers) in enumerate(zip(timeline.spans, timeline.transfers, strict=True)):
            with_input = "FI".replace({0: "F", 3: "I"}.get(rank, " "), "")
            before = {b.start: a for a, b in pairwise([None, *spans]) if b.action.kind.value in with_input}
            assert [(each.name, each.end) for each in transfers] == [("message", start) for start in before]
            assert all(each.start <= each.end for each in transfers)
            early = [last for each in transfers if (last := before[each.end]) and each.start <= last.start]
            assert early or rank in (0, 3)


def record(layout):
    """A step's timeline, None but on the first rank of all, and the part of its time that recording took.

    The thread's own time first, then all of it; each of the best of some steps, as a busy machine takes some too.
    """
    case = Case(layout, precision=FP32, model=replace(SHAPE, num_layers=6))
    assembly, step = build_step(case)
    recorder = TimelineRecorder("cpu", layout, timeout_s=60)
    spent_s, parts = [], []

    def timed(function, *arguments):
        started = time.thread_time(), time.perf_counter()
        function(*arguments)
        spent_s.append((time.thread_time() - started[0], time.perf_counter() - started[1]))

    assembly.runtime.before_action = partial(timed, recorder.before_action)
    assembly.runtime.after_input = partial(timed, recorder.after_input)
    for sync in assembly.sync:
        sync.observe(recorder.transfer)
    for _ in range(4):
        spent_s.clear()
        timed(recorder.begin)
        started = time.perf_counter()
        step(*local_rows(case))
        step_s = time.perf_counter() - started
        parts.append([sum(each) / step_s for each in zip(*spent_s, strict=True)])
    return recorder.gather(), [min(part) for part in zip(*parts, strict=True)]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gathers_and_reductions_are_recorded_where_they_run(ranks4, zero):
    """Of four units of each stage, three blocks and its rest."""
    timeline, (own, whole) = ranks4.run(record, Layout(pp=2, dp_shard=2, zero=zero))[0]
    assert 0 < own < 0.01 and 0 < whole < 0.05
    for spans, transfers in zip(timeline.spans, timeline.transfers, strict=True):
        during = {"gather": [], "reduce": []}
        for name, start, end in transfers:
            if name in during:
                during[name] += [str(span.action)[1:] for span in spans if span.start <= start <= end <= span.end]
        backwards = ["B3"] if zero == 1 else ["B0", "B1", "B2", "B3"]
        assert during["reduce"] == sorted(backwards * 4)
        if zero < 3:
            assert during["gather"] == ["F0"] * 4
        else:  # the last block is still there when its backward follows at once
            assert {*during["gather"]} == {f"{kind}{i}" for kind in "FB" for i in range(4)}
            assert [during["gather"].count(f"F{i}") for i in range(4)] == [4] * 4


def test_the_slow_stage_is_named_beside_the_prediction(recorded, capsys, tmp_path):
    page, trace = tmp_path / "timeline.html", tmp_path / "trace.json"
    assert main(["timeline", str(recorded), "--page", str(page), "--trace", str(trace), "--width", "60"]) == 0
    text = capsys.readouterr().out
    (slow_s,) = re.findall(r"^stage 2, on rank 2, is slow: ([0-9.]+) s ", text, re.MULTILINE)
    assert 2 * PLANTED_S <= float(slow_s) < 4 * PLANTED_S and text.count("is slow") == 1, text
    assert text.index("predicted: ") < text.index("measured: ") and ", step 5\n" in text
    assert "Stage 2, on rank 2, is slow" in page.read_text() and "<h2>Measured</h2>" in page.read_text()
    assert {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]} == set(range(8))
    assert main(["timeline", str(recorded), "--step", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 3 and [each["stage"] for each in found["slow_stages"]] == [2]
    assert 0 < found["measured"]["bubble"] < 1 and found["measured"]["pipeline_s"] > 0
    assert found["pipeline_s"] is None, "nobody has calibrated this CPU"


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--step", "4"], "--step 4 was not recorded; use one of 3, 5"),
        (["--layout.pp=2"], "--layout.pp=2 is of a config; a run is drawn as it was"),
    ],
)
def test_what_was_not_recorded_is_refused(recorded, more, problem, capsys):
    assert main(["timeline", str(recorded), *more]) == 2
    assert problem in capsys.readouterr().err


def test_a_run_that_recorded_nothing_says_how_one_does(tmp_path, capsys):
    assert main(["timeline", str(tmp_path)]) == 2
    assert "cannot be read: No such file or directory; a run writes it with --metrics.timeline=true" in (
        capsys.readouterr().err
    )
