"""A pipeline's timeline as one page: the predicted one above the measured one."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from dtlayout.pipelining.timeline import Timeline, Transfer, find_scales
from dtlayout.pipelining.timing import Span
from dtlayout.report import html
from dtlayout.report.charts import TrackSpan, draw_tracks
from dtlayout.schedules.actions import Kind
from dtlayout.schedules.placement import Placement

_COLOURS = {Kind.FORWARD: 0, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 2, Kind.BACKWARD_WEIGHT: 3}
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, its input's part",
    Kind.BACKWARD_WEIGHT: "backward, its weights' part",
}
_TRANSFERS = {"gather": 5, "reduce": 7, "message": 1}
_NOTATION = (
    "An action is named as 3F0: stage 3, forward (B backward, I and W its input's and weights' part), microbatch 0. "
    "A rank's second and further stages are pale, and what is empty is waiting. Of transfers, gathers of parameters "
    "and reductions of gradients last as long as they run, and messages from when they are asked for to when they are "
    "used."
)


def write_page(
    path: Path, title: str, timelines: Mapping[str, Timeline], placement: Placement, findings: Sequence[str]
) -> None:
    """Write the page of one step's timelines by name; DtlayoutError if it cannot be."""
    html.write_page(path, title, _parts(timelines, placement, findings))


def _parts(timelines: Mapping[str, Timeline], placement: Placement, findings: Sequence[str]) -> Iterator[str]:
    yield from (html.paragraph(finding.capitalize() + ".", "lead") for finding in findings)
    scales = find_scales(timelines)
    for name, timeline in timelines.items():
        yield html.heading(name.capitalize())
        yield html.paragraph(f"{timeline.describe()}.")
        kinds = dict.fromkeys(span.action.kind for rank in timeline.spans for span in rank)
        tracks = [
            (
                f"rank {rank}",
                [_to_piece(span, placement, timeline) for span in spans],
                f"{waits / timeline.total_s:.1%} waiting",
            )
            for rank, (spans, waits) in enumerate(zip(timeline.spans, timeline.waits_s, strict=True))
        ]
        below = [("its transfers", [*map(_to_transfer, rank)], "") for rank in timeline.transfers]
        tracks = [track for pair in zip_longest(tracks, below) for track in pair if track]
        transfers = {each.name for rank in timeline.transfers for each in rank}
        legend = {_NAMES[kind]: _COLOURS[kind] for kind in kinds}
        legend |= {name: colour for name, colour in _TRANSFERS.items() if name in transfers}
        show = _show_seconds if timeline.knows_time else "{:.0%}".format
        yield draw_tracks(tracks, legend, scales[name], show, name=f"{name} timeline")
    yield html.paragraph(_NOTATION, "note")


def _show_seconds(seconds: float) -> str:
    """A place on the axis.

    >>> _show_seconds(0.25), _show_seconds(2.5), _show_seconds(0.0)
    ('250 ms', '2.5 s', '0')
    """
    if not seconds:
        return "0"
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def _to_piece(span: Span, placement: Placement, timeline: Timeline) -> TrackSpan:
    action = span.action
    is_later = placement.chunk_of(action.stage) > 0
    when = f"{span.start:.4f} to {span.end:.4f} s" if timeline.knows_time else f"{span.start:.2%} to {span.end:.2%}"
    return TrackSpan(span.start, span.end, _COLOURS[action.kind], is_later, f"{action}: {when}")


def _to_transfer(transfer: Transfer) -> TrackSpan:
    name, start, end = transfer
    return TrackSpan(start, end, _TRANSFERS[name], name == "message", f"{name}: {start:.4f} to {end:.4f} s")
