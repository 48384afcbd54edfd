"""A dry run as one page that needs no other file: the curve of memory over the step, and the tables."""

from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt

from dtlayout.commands.dryrun_tables import describe_peak, describe_place, describe_run, list_tables, list_times
from dtlayout.dryrun.findings import Findings
from dtlayout.dryrun.report import RankReport
from dtlayout.measure.ledger import UPDATE
from dtlayout.report import html
from dtlayout.text import choose_unit

_NOTATION = (
    "Actions are named as 3F0: stage 3, forward (B: backward, SEND and RECV: its messages), microbatch 0. "
    "The curve shows the largest total during each of them."
)
_MOST_TICKS = 16
"""Actions that are named below a curve."""


def write_page(path: Path, findings: Findings) -> None:
    """Write the page; DtlayoutError if it cannot be."""
    html.write_page(path, findings.title, _parts(findings))


def _parts(findings: Findings) -> Iterator[str]:
    yield from (html.paragraph(note, "note") for note in findings.notes)
    yield html.paragraph(_NOTATION, "note")
    if times := list_times(findings, compares=True):
        yield html.table(times)
    for report in findings.reports:
        yield html.heading(describe_place(report, findings))
        yield html.paragraph(f"peak {describe_peak(report, findings)}")
        yield html.paragraph(describe_run(report, findings), "note")
        yield _draw_curve(report, findings)
        yield from map(html.table, list_tables(report, findings, compares=True))


def _draw_curve(report: RankReport, findings: Findings) -> str:
    """The largest total during each action as SVG: dry, predicted and measured; the capacity if it is not far above."""
    unit, size = choose_unit(report.peak_bytes)
    edges = range(len(report.curve) + 1)
    heights = [highest.nbytes / size for highest in report.curve]
    capacity = findings.estimate.capacity_bytes / size
    figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
    axes.stairs(heights, edges, baseline=0, fill=True, color="#4477aa", alpha=0.6, label="dry run")
    predicted = [nbytes / size for nbytes in findings.predicted_curve(report)]
    axes.stairs(predicted, edges, baseline=None, color="#cc3311", linewidth=2.2, alpha=0.7, label="predicted")
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
    axes.annotate(label, (peak + 0.5, heights[peak]), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    every = -(-len(heights) // _MOST_TICKS)
    ends = [i for i, highest in enumerate(report.curve) if highest.action == UPDATE]
    for end in ends[:-1]:
        axes.axvline(end + 1, color="0.6", linewidth=0.8, linestyle=":")
    places = [i for i in range(len(heights)) if i % every == 0 or i in (*ends, peak)]
    axes.set_xticks([i + 0.5 for i in places], [report.curve[i].action for i in places], rotation=60, fontsize=7)
    axes.set(xlim=(0, len(heights)), ylim=(0, 1.12 * top), ylabel=unit)
    figure.legend(loc="outside upper right", fontsize=8, ncols=4, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return html.picture(figure)
