"""Pages that need no other file: their frame, tables and pictures."""

import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # pictures are written, never shown; before pyplot looks for a display

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from dtlayout.files import write

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1em; color: #222; }
h1 { font-size: 1.4em; } h2 { font-size: 1.15em; margin: 2.2em 0 .3em; border-top: 1px solid #ddd; padding-top: 1em; }
p { margin: .2em 0; } .note { color: #666; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
th, td { padding: .15em .9em .15em 0; text-align: right; border-bottom: 1px solid #eee; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; }
svg { width: 100%; height: auto; }
"""


def write_page(path: Path, title: str, parts: Iterable[str], style: str = "") -> None:
    """Write HTML parts as a page with the title as its heading; DtlayoutError if it cannot be."""
    heading = html.escape(title)
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{heading}</title>'
        f"<style>{_STYLE}{style}</style></head><body><h1>{heading}</h1>{''.join(parts)}</body></html>\n"
    )
    write(path, page, "page")


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    return f"<p{f' class={kind}' if kind else ''}>{html.escape(text)}</p>"


def heading(text: str) -> str:
    """A heading of a part of the page."""
    return f"<h2>{html.escape(text)}</h2>"


def table(rows: Sequence[Sequence[str]], attributes: str = "") -> str:
    """Rows of plain text, the first with the names of the columns."""
    head, *body = [list(row) for row in rows]
    names = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    return f"<table{attributes}><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table>"


def picture(figure: Figure) -> str:
    """A figure as SVG, which is closed."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    plt.close(figure)
    _, tag, drawing = text.getvalue().partition("<svg")  # what is before belongs to a file of its own
    return tag + drawing
