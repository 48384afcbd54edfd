"""Pages that need no other file: their frame, tables that sort and filter, and pictures that follow light and dark.

How all of them look is page.css, what their tables do page.js. A page's body never scrolls sideways: what may be wider
than a phone stands in an element that does.
"""

import html
import io
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path

import matplotlib

if "ipykernel" not in sys.modules:  # a notebook shows pictures itself
    matplotlib.use("Agg")  # pictures are written, never shown; before pyplot looks for a display

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from dtlayout.base.files import PAGE_MARK, check_own, write

matplotlib.rcParams["text.parse_math"] = False  # a name with dollars in it is a name


def _read_style() -> str:
    return files("dtlayout.report").joinpath("page.css").read_text("utf-8")


COLOURS = dict(re.findall(r"--(c\d|mark): (#[0-9a-f]{6});", _read_style().partition("@media")[0]))
"""Name of a colour in page.css → the colour in light; in the SVG of a page it becomes the name, and so follows dark."""
ACCENT, MARK = COLOURS["c0"], COLOURS["mark"]
"""Colours of figures: of what is there, and of what is set beside it."""
LINES = [COLOURS[name] for name in ("c0", "c2", "c3", "c5", "c7", "c6")] + [*plt.get_cmap("Dark2").colors]  # type: ignore[attr-defined]
"""Colours of lines and dots, each of which stands out on the page and beside the others: strong ones of page.css, then
further ones, which are the same in light and dark."""
_NUMBER = re.compile(r"[×+]?-?[\d.,]+( ?(%|[A-Za-z]+))?")


class NotebookFigure(Figure):
    """A figure that any notebook shows as a picture, without `%matplotlib inline` too."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png", bbox_inches="tight")
        return picture.getvalue()


class Markup(str):
    """Text that is HTML already; all other text is escaped."""


def write_page(path: Path, title: str, parts: Iterable[str]) -> None:
    """Write HTML parts as a page with the title as its heading; DtlayoutError if it cannot be, or is no page now."""
    check_own(path, PAGE_MARK, "a page")
    style, script = _read_style(), files("dtlayout.report").joinpath("page.js").read_text("utf-8")
    name = escape(title)
    page = (
        f'{PAGE_MARK}<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{style}</style></head>"
        f"<body><h1>{name}</h1>{''.join(parts)}<script>{script}</script></body></html>\n"
    )
    write(path, page, "page")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches, which no window and no other figure knows."""
    return NotebookFigure(figsize=(width, height), layout="constrained")


def fragment(title: str, parts: Iterable[str]) -> str:
    """HTML parts as a piece of another page, such as a notebook's, on which their style has no effect elsewhere."""
    style = re.sub(r"^( *)(?::root|body)(?= \{)", r"\1&", _read_style(), flags=re.MULTILINE)
    inside = f'<section role="region" aria-label="{html.escape(title)}">{subheading(title)}{"".join(parts)}</section>'
    return f'<div class="dtlayout"><style>.dtlayout {{\n{style}}}</style>{inside}</div>'


def escape(text: str) -> Markup:
    """Text as HTML, once."""
    return text if isinstance(text, Markup) else Markup(html.escape(text))


def breakable(name: str) -> Markup:
    """A long name as HTML that may be broken after its parts, as those of files and sweeps."""
    return Markup(re.sub(r"(?<=[/_·])", "<wbr>", escape(name)))


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph; `kind` is lead for what matters most, note for what does least."""
    return f"<p{f' class={kind}' if kind else ''}>{escape(text)}</p>"


def heading(text: str) -> str:
    """A heading of a part of the page."""
    return f"<h2>{escape(text)}</h2>"


def subheading(text: str) -> str:
    """A heading inside a part."""
    return f"<h3>{escape(text)}</h3>"


def bullets(sentences: Iterable[str]) -> str:
    """A list of sentences."""
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"


def fold(summary: str, content: str) -> str:
    """Content that is hidden below a summary until somebody opens it."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def wide(content: str, name: str) -> str:
    """Content that scrolls sideways by itself, by keyboard too; `name` is what it is read out as."""
    return f'<div class="wide" role="region" tabindex="0" aria-label="{html.escape(name)}">{content}</div>'


def table(rows: Sequence[Sequence[str]], name: str = "") -> str:
    """Rows of text, the first with the names of the columns; numbers stand on the right."""
    head, *body = rows
    return wide(_table(head, body, [f"<th>{escape(cell)}</th>" for cell in head]), name or head[0])


def sorted_table(rows: Sequence[Sequence[str]], name: str, by: str, order: str = "descending") -> str:
    """A table that sorts by a press on a heading, with a filter above it; its rows come in the `order` of a column."""
    head, *body = rows
    orders = [order if column == by else "none" for column in head]
    heads = [
        f'<th aria-sort="{sort}"><button type="button">{escape(column)}</button></th>'
        for column, sort in zip(head, orders, strict=True)
    ]
    ident = re.sub(r"\W+", "-", name.lower())
    box = (
        f'<div class="filter" data-table="{ident}"><input type="search" aria-label="Filter" '
        f'placeholder="filter: words, or conditions such as tp=2 mfu>40"><output aria-live="polite"></output></div>'
    )
    return box + wide(_table(head, body, heads, f' id="{ident}"'), name)


def _table(head: Sequence[str], body: Sequence[Sequence[str]], heads: Sequence[str], attributes: str = "") -> str:
    columns = zip_longest(*body, fillvalue="")
    is_text = [any(cell and not _NUMBER.fullmatch(cell) for cell in column) for column in columns] or [False] * len(
        head
    )
    heads = [cell.replace("<th", "<th class=t", 1) if text else cell for cell, text in zip(heads, is_text, strict=True)]
    lines = (
        "".join(
            f"<td{' class=t' * text}>{escape(cell) if i else breakable(cell)}</td>"
            for i, (cell, text) in enumerate(zip(row, is_text, strict=True))
        )
        for row in body
    )
    rows = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table{attributes}><thead><tr>{''.join(heads)}</tr></thead><tbody>{rows}</tbody></table>"


def picture(figure: Figure, name: str, narrow: Figure | None = None) -> str:
    """A figure as SVG with words that can be selected, which is closed; `name` is what it is read out as.

    Greys become mixtures of the page's ink and paper, COLOURS its own, so that all follow light and dark. Where
    a page is narrow `narrow` stands in its place, whole; without one the figure scrolls sideways.
    """
    if narrow is None:
        return wide(_to_svg(figure, name), name)
    desk, phone = wide(_to_svg(figure, name), name), _to_svg(narrow, name)
    return f'<div class="desk">{desk}</div><div class="phone">{phone}</div>'


def _to_svg(figure: Figure, name: str) -> str:
    text = io.StringIO()
    with plt.rc_context({"svg.fonttype": "none"}):
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    plt.close(figure)
    _, _, drawing = text.getvalue().partition("<svg")  # what is before belongs to a file of its own
    drawing = f'<svg role="img" aria-label="{html.escape(name)}"' + drawing
    for name, colour in COLOURS.items():
        drawing = drawing.replace(colour, f"var(--{name})")
    return re.sub(r"#([0-9a-f]{2})\1\1\b", _mix, drawing)


def _mix(grey: re.Match[str]) -> str:
    percents = 100 * (1 - int(grey[1], 16) / 255)
    return f"color-mix(in srgb, var(--ink) {percents:.0f}%, var(--paper))"
