"""dtlayout timeline: when each pipeline rank does what, predicted of a config, or also measured in a run."""

import argparse
import json
from itertools import zip_longest
from pathlib import Path

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import three_digits
from dtlayout.commands.arguments import show
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
    """The config or run, the machines and the files."""
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
    """Draw the pipeline's part of a step; InvalidConfig where there is none, or none of that step."""
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
    findings = [_describe(each) for each in slow]
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
    }
    lines, scales = [title, ""], find_scales(timelines)
    for name, timeline in timelines.items():
        column_s = scales[name] / options.width
        column = f"{three_digits(column_s)} s" if column_s >= 1 else f"{column_s * 1e3:.3g} ms"
        if not timeline.knows_time:
            column = f"{column_s:.2%} of it ({NO_TIME})"
        lines.append(f"{name}: {timeline.describe()}; a column is {column}")
        rows = zip(draw(timeline, layout.placement, column_s), timeline.waits_s, strict=True)
        drawn = [f"rank {i:<3} {row}  {waits / timeline.total_s:5.1%}" for i, (row, waits) in enumerate(rows)]
        below = [f"         {row}" for row in draw_transfers(timeline, column_s)]
        lines += [line for pair in zip_longest(drawn, below) for line in pair if line]
        lines.append("")
    lines += [*findings, _LETTERS + _TRANSFERS * (measured is not None)]
    lines += [f"written: {path}" for path in (options.page, options.trace, options.csv) if path]
    return show(options, document, lines)


def _read_run(options: argparse.Namespace) -> tuple[Case, int, Timeline]:
    """What a run was, and the step of it that is asked for."""
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
    """The step's actions, every one played."""
    estimator, layout = Estimator(case.scenario), case.layout
    times = stage_times(layout.schedule, estimator.work(layout, case.kernels), estimator.delay_s(layout))
    m = layout.num_microbatches(case.scenario.batch)
    timeline = Timeline(play_spans(find_schedule(layout.schedule), layout.placement, m, times))
    return timeline if case.scenario.knows_time else timeline.without_time()


def _describe(slow: SlowStage) -> str:
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
