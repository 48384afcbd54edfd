"""A dry run as one page that needs no other file: the curve of memory over the step, and the tables."""

import html
import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # pictures are written, never shown; before pyplot looks for a display

import matplotlib.pyplot as plt

from dtlayout.commands.dryrun_tables import RankTables, choose_unit
from dtlayout.dryrun.report import UPDATE, RankReport
from dtlayout.errors import DtlayoutError

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1em; color: #222; }
h1 { font-size: 1.4em; } h2 { font-size: 1.15em; margin: 2.2em 0 .3em; border-top: 1px solid #ddd; padding-top: 1em; }
p { margin: .2em 0; } .note { color: #666; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
th, td { padding: .15em .9em .15em 0; text-align: right; border-bottom: 1px solid #eee; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; }
svg { width: 100%; height: auto; }
"""
_MOST_TICKS = 16
"""Actions that are named below a curve."""


def write_page(
    path: Path,
    title: str,
    notes: Sequence[str],
    ranks: Sequence[tuple[RankReport, RankTables, float]],
    capacity_bytes: float,
) -> None:
    """Write the page of reports with their tables and predicted peaks, in bytes; DtlayoutError if it cannot be."""
    parts = [f"<h1>{html.escape(title)}</h1>", *(f'<p class="note">{html.escape(note)}</p>' for note in notes)]
    for report, tables, predicted_bytes in ranks:
        parts += [
            f"<h2>{html.escape(tables.place)}</h2>",
            f"<p>peak {html.escape(tables.peak)}</p>",
            f'<p class="note">{html.escape(tables.run)}</p>',
            draw_curve(report, predicted_bytes, capacity_bytes),
            *(_to_html(rows) for rows in tables.tables),
        ]
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DtlayoutError(f"page {path} cannot be written: {error.strerror}") from None


def draw_curve(report: RankReport, predicted_bytes: float, capacity_bytes: float) -> str:
    """The largest total during each action as SVG; the capacity only where it is not far above."""
    unit, size = choose_unit(report.peak_bytes)
    heights = [highest.nbytes / size for highest in report.curve]
    figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
    axes.stairs(heights, range(len(heights) + 1), baseline=0, fill=True, color="#4477aa", alpha=0.75, label="dry run")
    axes.axhline(predicted_bytes / size, color="#cc6677", linewidth=1, linestyle="--", label="predicted peak")
    top = max(*heights, predicted_bytes / size)
    if capacity_bytes / size < 1.6 * top:
        axes.axhline(capacity_bytes / size, color="0.2", linewidth=1, label="capacity")
        top = max(top, capacity_bytes / size)
    every = -(-len(heights) // _MOST_TICKS)
    places = [i for i, highest in enumerate(report.curve) if i % every == 0 or highest.action == UPDATE]
    axes.set_xticks([i + 0.5 for i in places], [report.curve[i].action for i in places], rotation=60, fontsize=7)
    axes.set(xlim=(0, len(heights)), ylim=(0, 1.08 * top), ylabel=unit)
    axes.legend(loc="lower right", fontsize=8, ncols=3, frameon=True)
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
