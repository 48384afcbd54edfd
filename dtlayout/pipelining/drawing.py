"""A pipeline's timeline as text and as a trace. Pure Python.

As text a rank is a row and a column some time: what a rank does most of it is `F`, `B`, `I` or `W`, torch's letters for
forward, backward and the two parts of a backward, small ones on the rank's second and every further stage, and `.`
where it waits. The trace is the JSON of Chrome's trace event format, which Perfetto (https://ui.perfetto.dev) opens.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any

from dtlayout.pipelining.placement import Placement
from dtlayout.pipelining.timeline import Timeline
from dtlayout.pipelining.timing import Span

WAITS = "."
_MICROSECONDS = 1e6
_ROUNDED = 1e-6
"""Of a column, by which the last one may be too long."""


def draw(timeline: Timeline, placement: Placement, column_s: float) -> list[str]:
    """A row for each rank, with a character for each `column_s` seconds of the whole."""
    width = ceil(timeline.total_s / column_s - _ROUNDED)
    return ["".join(_draw_rank(rank, placement, column_s, width)) for rank in timeline.spans]


def _draw_rank(spans: Sequence[Span], placement: Placement, column_s: float, width: int) -> Iterator[str]:
    shown_s = [defaultdict[str, float](float) for _ in range(width)]
    for span in spans:
        letter = span.action.kind.value
        letter = letter.lower() if placement.chunk_of(span.action.stage) else letter
        for column in range(int(span.start / column_s), min(width, ceil(span.end / column_s))):
            start_s, end_s = column * column_s, (column + 1) * column_s
            shown_s[column][letter] += min(end_s, span.end) - max(start_s, span.start)
    for shown in shown_s:
        shown[WAITS] = column_s - sum(shown.values())
        yield max(shown, key=shown.__getitem__)


def to_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """A trace with a process for each pipeline rank of each timeline, which has its name; times in microseconds."""
    names, actions = list[dict[str, Any]](), list[dict[str, Any]]()
    for name, rank in ((name, rank) for name, timeline in timelines.items() for rank in timeline.spans):
        process, title = len(names), {"name": f"pipeline rank {rank[0].rank}, {name}"}
        names.append({"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": title})
        actions += [_to_event(span, process) for span in rank]
    return {"traceEvents": [*names, *actions], "displayTimeUnit": "ms"}


def _to_event(span: Span, process: int) -> dict[str, Any]:
    return {
        "name": str(span.action), "cat": span.action.kind.name.lower(), "ph": "X", "pid": process, "tid": 0,
        "ts": span.start * _MICROSECONDS, "dur": (span.end - span.start) * _MICROSECONDS,
        "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
    }  # fmt: skip
