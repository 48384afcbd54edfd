"""dtlayout timeline: when each pipeline rank does what, predicted of a config, or also measured in a run."""

import argparse
import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import fold, three_digits
from dtlayout.commands.arguments import CommandAnswer, JsonDocument, show_answer
from dtlayout.commands.case import Case, add_machines, read_case
from dtlayout.costmodel.estimate import Estimator, stage_times
from dtlayout.costmodel.scenario import NO_TIME
from dtlayout.pipelining.drawing import WAITS, draw, draw_transfers, to_trace
from dtlayout.pipelining.timeline import SlowStage, Timeline, find_scales
from dtlayout.pipelining.timing import play_spans
from dtlayout.schedules.schedule_file import write_schedule
from dtlayout.schedules.schedules import find_schedule
from dtlayout.training.metrics import RecordedTimelines

EXAMPLE = "dtlayout timeline configs/debug.toml --gpu cpu --gpus 8"
WIDTH = 110
PREDICTED, MEASURED = "predicted", "measured"
_LETTERS = (
    f"F forward, B backward, I and W its input's and weights' parts, small on further stages; {WAITS} and % waits"
)
_TRANSFERS = "; below a rank g gathers parameters, r reduces gradients, m has asked for a message"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config or run, the machines and the files."""
    parser.add_argument("config", type=Path, metavar="CONFIG|RUN", help="a config, or the folder of a recorded run")
    add_machines(parser)
    parser.add_argument("--step", type=int, metavar="N", help="of a run the step to draw; the last one recorded")
    parser.add_argument("--width", type=int, default=WIDTH, metavar="N", help="columns of the picture; %(default)s")
    parser.add_argument("--page", type=Path, metavar="FILE", help="a page that needs no other file")
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="the order, as layout.schedule=csv:FILE and torch read it"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a trace that Perfetto and chrome://tracing open")


def run(options: argparse.Namespace) -> int:
    """Draw the pipeline's part of a step; InvalidConfig without a pipeline, or if that step was not recorded."""
    return show_answer(options, answer(options))


def answer(options: argparse.Namespace) -> CommandAnswer:
    """The pipeline's part of a step; writes the files that are asked for. InvalidConfig as `run`."""
    if options.width < 1:
        raise InvalidConfig(f"--width {options.width} shows nothing; use 1 or more")
    step, measured = None, None
    if options.config.is_dir():
        case, step, measured = _read_run(options)
    elif options.step is not None:
        raise InvalidConfig(f"--step is of a run; {options.config} is a config")
    else:
        case = read_case(options.config, options.overrides, options)
    layout = case.layout
    if measured is None and not layout.is_pipelined:
        raise InvalidConfig(f"{layout} has no pipeline; use layout.pp=2 or more")
    timelines = {PREDICTED: _predict(case)} | ({MEASURED: measured} if measured else {})
    slow = measured.find_slow_stages(timelines[PREDICTED]) if measured else []
    title = f"{layout} on {layout.world_size} x {case.scenario.cluster.gpu.name}"
    title += f", step {step}" if measured else ""
    findings = [_describe_slow(each) for each in slow]
    if options.page:
        from dtlayout.report.timeline_page import write_page  # only now: it imports matplotlib

        write_page(options.page, title, timelines, layout.placement, findings)
    if options.trace:
        options.trace.write_text(json.dumps(to_trace(timelines)), encoding="utf-8")
    if options.csv:
        write_schedule([[span.action for span in rank] for rank in timelines[PREDICTED].spans], options.csv)
    document = {
        "layout": str(layout),
        **_to_document(timelines[PREDICTED]),
        **({"step": step, MEASURED: _to_document(measured)} if measured else {}),
        "slow_stages": [each._asdict() for each in slow],
        "_title": title,
        "_timelines": timelines,
        "_placement": layout.placement,
        "_width": options.width,
        "_written": [path for path in (options.page, options.trace, options.csv) if path],
    }
    return CommandAnswer(document, _describe)


def _describe(document: JsonDocument) -> Iterator[str]:
    """The pictures of the timelines, slow stages, and the files that were written."""
    yield from (*fold(document["_title"]), "")
    timelines = document["_timelines"]
    scales = find_scales(timelines)
    for name, timeline in timelines.items():
        column_s = scales[name] / document["_width"]
        column = f"{three_digits(column_s)} s" if column_s >= 1 else f"{column_s * 1e3:.3g} ms"
        if not timeline.knows_time:
            column = f"{column_s:.2%} of it ({NO_TIME})"
        yield from fold(f"{name}: {timeline.describe()}; a column is {column}")
        rows = zip(draw(timeline, document["_placement"], column_s), timeline.waits_s, strict=True)
        drawn = [f"rank {i:<3} {row}  {waits / timeline.total_s:5.1%}" for i, (row, waits) in enumerate(rows)]
        transfers = [f"         {row}" for row in draw_transfers(timeline, column_s)]
        yield from (line for pair in zip_longest(drawn, transfers) for line in pair if line)
        yield ""
    below = [_describe_slow(SlowStage(**each)) for each in document["slow_stages"]]
    below.append(_LETTERS + _TRANSFERS * (MEASURED in document))
    below += [f"written: {path}" for path in document["_written"]]
    for line in below:
        yield from fold(line)


def _read_run(options: argparse.Namespace) -> tuple[Case, int, Timeline]:
    """The case of a recorded run, the step that is asked for, and its timeline."""
    if options.overrides:
        raise InvalidConfig(f"{options.overrides[0]} is of a config; a run is drawn as it was")
    recorded = RecordedTimelines.read(options.config)
    if not recorded.steps:
        raise InvalidConfig(f"{options.config} has recorded no step yet; the third one is the first")
    step = max(recorded.steps) if options.step is None else options.step
    if step not in recorded.steps:
        known = ", ".join(map(str, sorted(recorded.steps)))
        raise InvalidConfig(f"--step {step} was not recorded; use one of {known}")
    run = recorded.run
    return Case(run.scenario, run.layout, run.kernels), step, recorded.steps[step]


def _predict(case: Case) -> Timeline:
    """The predicted timeline of a step, with every action of every microbatch."""
    estimator, layout = Estimator(case.scenario), case.layout
    times = stage_times(layout.schedule, estimator.work(layout, case.kernels), estimator.delay_s(layout))
    m = layout.num_microbatches(case.scenario.batch)
    timeline = Timeline(play_spans(find_schedule(layout.schedule), layout.placement, m, times))
    return timeline if case.scenario.knows_time else timeline.without_time()


def _describe_slow(slow: SlowStage) -> str:
    return (
        f"stage {slow.stage}, on rank {slow.rank}, is slow: {three_digits(slow.measured_s)} s for forward and backward "
        f"of a microbatch, {slow.measured_s / slow.expected_s:.2f} times what the other stages let expect"
    )


def _to_document(timeline: Timeline) -> dict[str, object]:
    ranks = zip(timeline.to_rows(), timeline.waits_s, strict=True)
    return {
        "pipeline_s": timeline.total_s if timeline.knows_time else None,
        "bubble": timeline.bubble,
        "ranks": [{"rank": rank, "waits_s": waits, "actions": own} for rank, (own, waits) in enumerate(ranks)],
        "transfers": timeline.transfers,
    }
