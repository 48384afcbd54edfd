"""A pipeline's timeline as text and as a trace. Pure Python.

In the text a rank is a row, and a column is some time. A column shows the letter of the action that takes most of it:
`F`, `B`, `I` or `W`, torch's letters for forward, backward and the two parts of a backward. Letters are small on the
rank's second and every further stage, and `.` means that the rank waits. Where transfers were recorded, a row below
shows what the rank gathers (`g`), reduces (`r`) and has asked for (`m`). The trace is the JSON of Chrome's trace event
format, which Perfetto (https://ui.perfetto.dev) opens.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any

from dtlayout.pipelining.timeline import Timeline, Transfer
from dtlayout.pipelining.timing import Span
from dtlayout.schedules.actions import Action
from dtlayout.schedules.placement import Placement

WAITS = "."
_MICROSECONDS = 1e6
_ROUNDED = 1e-6
"""Part of a column by which the last column may be too long, so that rounding adds no column."""


def draw(timeline: Timeline, placement: Placement, column_s: float) -> list[str]:
    """A row for each rank, with a character for each `column_s` seconds of the whole."""

    def letter_of(action: Action) -> str:
        return action.kind.value.lower() if placement.chunk_of(action.stage) else action.kind.value

    rows = [[(letter_of(span.action), span.start, span.end) for span in rank] for rank in timeline.spans]
    return _draw_rows(rows, timeline.total_s, column_s)


def draw_transfers(timeline: Timeline, column_s: float) -> list[str]:
    """A row like those of `draw` for the transfers of each rank; none where nobody has recorded transfers."""
    rows = [[(each.name[0], each.start, each.end) for each in rank] for rank in timeline.transfers]
    return _draw_rows(rows, timeline.total_s, column_s)


def _draw_rows(rows: Sequence[Sequence[tuple[str, float, float]]], total_s: float, column_s: float) -> list[str]:
    width = ceil(total_s / column_s - _ROUNDED)
    return ["".join(_draw_row(row, column_s, width)) for row in rows]


def _draw_row(works: Sequence[tuple[str, float, float]], column_s: float, width: int) -> Iterator[str]:
    """For each column the letter of the work that takes most of it."""
    shown_s = [defaultdict[str, float](float) for _ in range(width)]
    for letter, start, end in works:
        for column in range(max(0, int(start / column_s)), min(width, ceil(end / column_s))):
            start_s, end_s = column * column_s, (column + 1) * column_s
            shown_s[column][letter] += min(end_s, end) - max(start_s, start)
    for shown in shown_s:
        shown[WAITS] = column_s - sum(shown.values())
        yield max(shown, key=shown.__getitem__)


def to_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """A trace with a process for each pipeline rank of each timeline, by its name; times in microseconds."""
    names, events = list[dict[str, Any]](), list[dict[str, Any]]()
    for name, timeline in timelines.items():
        of = "" if timeline.knows_time else ", the whole drawn as 1 s"
        for rank, spans in enumerate(timeline.spans):
            process, title = len(names), {"name": f"pipeline rank {rank}, {name}{of}"}
            names.append({"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": title})
            events += [_to_event(span, process) for span in spans]
            for number, transfer in enumerate(timeline.transfers[rank] if timeline.transfers else ()):
                events += _to_async_events(transfer, process, number)
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


def _to_event(span: Span, process: int) -> dict[str, Any]:
    return {
        "name": str(span.action), "cat": span.action.kind.name.lower(), "ph": "X", "pid": process, "tid": 0,
        "ts": span.start * _MICROSECONDS, "dur": (span.end - span.start) * _MICROSECONDS,
        "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
    }  # fmt: skip


def _to_async_events(transfer: Transfer, process: int, number: int) -> Iterator[dict[str, Any]]:
    """Begin and end events of a transfer: unlike actions, transfers overlap."""
    for phase, seconds in (("b", transfer.start), ("e", transfer.end)):
        yield {
            "name": transfer.name, "cat": "transfer", "ph": phase, "id": number, "pid": process, "tid": 0,
            "ts": seconds * _MICROSECONDS,
        }  # fmt: skip
