"""A dry run as one page that needs no other file: the curve of memory over the step, and the tables."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import matplotlib.pyplot as plt

from dtlayout.base.formatting import choose_unit, format_bytes
from dtlayout.commands.dryrun_tables import (
    PARTS,
    describe_peak,
    describe_place,
    describe_run,
    list_tables,
    list_times,
)
from dtlayout.dryrun.findings import Findings
from dtlayout.dryrun.report import RankReport
from dtlayout.measure.ledger import UPDATE
from dtlayout.report import html
from dtlayout.report.charts import Bar, beside, draw_bars

_NOTATION = (
    "Actions are named as 3F0: stage 3, forward (B: backward, SEND and RECV: its messages), microbatch 0. "
    "The curve shows the largest total during each of them."
)
_MOST_TICKS = 14
"""Actions that are named below a curve."""
_MANY = 100
"""Actions from which on a strong line would hide what is below it."""


def write_page(path: Path, findings: Findings) -> None:
    """Write the page; DtlayoutError if it cannot be."""
    html.write_page(path, findings.title, _parts(findings))


def _parts(findings: Findings) -> Iterator[str]:
    yield from (html.paragraph(note, "note") for note in findings.notes)
    yield html.heading("Memory at the peak") + _draw_peaks(findings)
    if times := list_times(findings, compares=True):
        yield html.heading("Time of a step") + html.table(times)
    yield html.heading("Memory over the step") + html.paragraph(_NOTATION, "note")
    for report in findings.reports:
        shares, messages, flops, *compared = list_tables(report, findings, compares=True)
        yield html.subheading(describe_place(report, findings).capitalize())
        yield html.paragraph(f"The peak is {describe_peak(report, findings)}. Run: {describe_run(report, findings)}.")
        yield _draw_curve(report, findings)
        yield beside(map(html.table, (shares, *compared)))
        yield html.fold("Messages", html.table(messages)) + html.fold("FLOPs by module", html.table(flops))


def _draw_peaks(findings: Findings) -> str:
    """What each rank held at its peak, with marks where the cost model predicts it."""
    _, size = choose_unit(max(report.peak_bytes for report in findings.reports))
    bars = [
        Bar(
            name=describe_place(report, findings),
            parts=[getattr(report.parts, key) / size for key in PARTS],
            text=format_bytes(report.peak_bytes) + ("" if findings.fits(report) else ", does not fit"),
            mark=findings.predicted(report).total / size,
        )
        for report in findings.reports
    ]
    return draw_bars(bars, list(PARTS.values()), "predicted")


def _space_out(places: Iterable[int], least: float) -> list[int]:
    """Those that lie far enough from all that are taken before them."""
    taken: list[int] = []
    for place in places:
        if all(abs(place - other) >= least for other in taken):
            taken.append(place)
    return taken


def _draw_curve(report: RankReport, findings: Findings) -> str:
    """The largest total during each action as SVG: dry, predicted and measured; the capacity if it is not far above."""
    unit, size = choose_unit(report.peak_bytes)
    edges = range(len(report.curve) + 1)
    heights = [highest.nbytes / size for highest in report.curve]
    capacity = findings.estimate.capacity_bytes / size
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    axes.stairs(heights, edges, baseline=0, fill=True, color=html.ACCENT, alpha=0.6, label="dry run")
    width = 2.2 if len(heights) < _MANY else 0.8
    predicted = [nbytes / size for nbytes in findings.predicted_curve(report)]
    axes.stairs(predicted, edges, baseline=None, color=html.MARK, linewidth=width, alpha=0.7, label="predicted")
    top = max(*heights, *predicted)
    if measured := findings.measured.get(report.rank):
        held = [highest.nbytes / size for highest in measured]
        axes.stairs(held, edges, baseline=None, color="black", linewidth=1, linestyle=(0, (2, 2)), label="measured")
        top = max(top, *held)
    if capacity < 1.6 * top:
        axes.axhline(capacity, color="0.2", linewidth=1, label=f"capacity, {capacity:.2f} {unit}")
        top = max(top, capacity)
    peak = heights.index(max(heights))
    label = f"{heights[peak]:.3f} {unit} in {report.curve[peak].action}"
    side = "left" if peak < 0.2 * len(heights) else "right" if peak > 0.8 * len(heights) else "center"
    axes.annotate(label, (peak + 0.5, heights[peak]), (0, 3), textcoords="offset points", ha=side, fontsize=8)
    ends = [i for i, highest in enumerate(report.curve) if highest.action == UPDATE]
    for end in ends[:-1]:
        axes.axvline(end + 1, color="0.6", linewidth=0.8, linestyle=":")
    computing = (i for i, highest in enumerate(report.curve) if "_" not in highest.action)  # messages have long names
    places = _space_out((peak, *ends, *computing), len(heights) / _MOST_TICKS)
    axes.set_xticks([i + 0.5 for i in places], [report.curve[i].action for i in places], fontsize=8)
    axes.set(xlim=(0, len(heights)), ylim=(0, 1.12 * top), ylabel=unit)
    figure.legend(loc="outside upper right", fontsize=8, ncols=4, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return html.picture(figure, f"memory of rank {report.rank} over the step")
