"""A dry run as one page that needs no other file: the curve of memory over the step, and the tables."""

import html
import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # pictures are written, never shown; before pyplot looks for a display

import matplotlib.pyplot as plt

from dtlayout.commands.dryrun_tables import RankTables, choose_unit, list_times
from dtlayout.dryrun.findings import Findings
from dtlayout.dryrun.report import RankReport
from dtlayout.errors import DtlayoutError
from dtlayout.measure.curve import UPDATE

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1em; color: #222; }
h1 { font-size: 1.4em; } h2 { font-size: 1.15em; margin: 2.2em 0 .3em; border-top: 1px solid #ddd; padding-top: 1em; }
p { margin: .2em 0; } .note { color: #666; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
th, td { padding: .15em .9em .15em 0; text-align: right; border-bottom: 1px solid #eee; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; }
svg { width: 100%; height: auto; }
"""
_NOTATION = (
    "Actions are named as 3F0: stage 3, forward (B: backward, SEND and RECV: its messages), microbatch 0. "
    "The curve shows the largest total during each of them."
)
_MOST_TICKS = 16
"""Actions that are named below a curve."""


def write_page(path: Path, findings: Findings) -> None:
    """Write the page; DtlayoutError if it cannot be."""
    title = html.escape(findings.title)
    parts = [f"<h1>{title}</h1>", *(f'<p class="note">{html.escape(note)}</p>' for note in findings.notes)]
    parts.append(f'<p class="note">{_NOTATION}</p>')
    if times := list_times(findings, compares=True):
        parts.append(_to_html(times))
    for report in findings.reports:
        tables = RankTables.make(report, findings, compares=True)
        parts += [
            f"<h2>{html.escape(tables.place)}</h2>",
            f"<p>peak {html.escape(tables.peak)}</p>",
            f'<p class="note">{html.escape(tables.run)}</p>',
            draw_curve(report, findings),
            *(_to_html(rows) for rows in tables.tables),
        ]
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DtlayoutError(f"page {path} cannot be written: {error.strerror}") from None


def draw_curve(report: RankReport, findings: Findings) -> str:
    """The largest total during each action as SVG: dry, predicted and measured; the capacity if it is not far above."""
    unit, size = choose_unit(report.peak_bytes)
    edges = range(len(report.curve) + 1)
    heights = [highest.nbytes / size for highest in report.curve]
    capacity = findings.capacity_bytes / size
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
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    plt.close(figure)
    _, tag, picture = text.getvalue().partition("<svg")  # what is before belongs to a file of its own
    return tag + picture


def _to_html(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) for tag, row in _tagged(rows))
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in body)}</table>"


def _tagged(rows: Sequence[Sequence[str]]) -> Sequence[tuple[str, Sequence[str]]]:
    return [("td" if i else "th", row) for i, row in enumerate(rows)]
