"""Charts of HTML alone, whose words keep their size on a phone: bars, bars of parts, tracks, ratios, heat."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import floor, log, log10
from typing import NamedTuple

from dtlayout.report.html import Markup, breakable, escape, wide

_NUM_COLOURS = 8
"""--c0 to --c7 of page.css."""
_PIECE_PIXELS = 3
"""Least width of each piece of a track, so that the shortest can be seen."""
_STRONGEST = 60
"""Percent of the accent's colour in the square with the largest number."""


class Bar(NamedTuple):
    """A bar of a chart, with its name and its value."""

    name: str
    parts: Sequence[float]
    """Lengths of its parts, one colour each, in one unit with all others."""
    text: str
    """Value of the bar as text, such as "1.5 s"."""
    mark: float | None = None
    """Value to compare with, drawn as a mark in the bars' unit; None for no mark."""


def draw_bars(bars: Sequence[Bar], parts: Sequence[str] = (), mark: str = "", whole: float = 0.0, *, name: str) -> str:
    """HTML of bars below each other on one scale, which ends at the longest bar, the farthest mark or `whole`.

    `name` is what the chart is read out as.

    A legend says what colours (`parts`) and marks (`mark`) mean.
    """
    longest = max(whole, *(max(sum(bar.parts), bar.mark or 0.0) for bar in bars)) or 1.0
    lines = []
    for bar in bars:
        pieces = [
            f'<i style="width:{100 * part / longest:.2f}%;background:var(--c{i % _NUM_COLOURS})"{_title(parts, i)}></i>'
            for i, part in enumerate(bar.parts)
            if part > 0
        ]
        at = "" if bar.mark is None else f'<u style="left:{100 * bar.mark / longest:.2f}%"></u>'
        track = f'<span class="track">{"".join(pieces)}{at}</span>'
        lines.append(f"<div><b>{escape(bar.name)}</b>{track}<em>{escape(bar.text)}</em></div>")
    colours = {part: i for i, part in enumerate(parts) if any(i < len(bar.parts) and bar.parts[i] > 0 for bar in bars)}
    return _draw_keys(colours, mark) + _frame(lines, name)


def _frame(lines: Sequence[str], name: str) -> str:
    """The lines of a chart, as a figure with a name."""
    return f'<div class="bars" role="figure" aria-label="{escape(name)}">{"".join(lines)}</div>'


def _title(parts: Sequence[str], i: int) -> str:
    return f' title="{escape(parts[i])}"' if i < len(parts) else ""


def _draw_keys(colours: Mapping[str, int], mark: str = "") -> str:
    keys = [
        f'<span><i style="background:var(--c{colour % _NUM_COLOURS})"></i>{escape(name)}</span>'
        for name, colour in colours.items()
    ]
    keys += [f"<span><u></u>{escape(mark)}</span>"] * bool(mark)
    return f'<div class="keys">{"".join(keys)}</div>' if keys else ""


class TrackSpan(NamedTuple):
    """A piece of a track, from `start` to `end`."""

    start: float
    end: float
    colour: int
    """Number of its colour among those of the page."""
    is_pale: bool
    text: str
    """Text that a screen reader reads out."""


def draw_tracks(
    tracks: Sequence[tuple[str, Sequence[TrackSpan], str]],
    colours: Mapping[str, int],
    whole: float,
    show: Callable[[float], str],
    *,
    name: str,
) -> str:
    """Lines of pieces below each other, each with a name and a number in words, all from 0 to `whole`.

    `colours` are named in a legend, `show` makes the texts of the axis. Lines of many pieces are wider than the page,
    and buttons make them wider still: they scroll sideways by themselves. `name` is what the chart is read out as.
    """
    width = _PIECE_PIXELS * max((len(pieces) for _, pieces, _ in tracks), default=0)
    style = f'style="min-width:max(14em, {width}px)"'
    ticks = [step * _choose_step(whole) for step in range(int(whole / _choose_step(whole) + 1e-9) + 1)]
    labels = "".join(f'<span style="left:{100 * tick / whole:.3f}%">{escape(show(tick))}</span>' for tick in ticks)
    lines = [f'<div><b></b><span class="axis" {style}>{labels}</span><em></em></div>']
    for label, pieces, text in tracks:
        drawn = "".join(
            f'<i{" class=pale" * piece.is_pale} style="left:{100 * piece.start / whole:.3f}%;'
            f"width:{100 * (piece.end - piece.start) / whole:.3f}%;"
            f'background:var(--c{piece.colour % _NUM_COLOURS})" title="{escape(piece.text)}"></i>'
            for piece in pieces
        )
        track = f'<span class="track spans" {style}>{drawn}</span>'
        lines.append(f"<div><b>{escape(label)}</b>{track}<em>{escape(text)}</em></div>")
    return _draw_keys(colours) + _ZOOM + wide(_frame(lines, name), name)


_ZOOM = (
    '<div class="zoom" role="group" aria-label="zoom"><button type="button" data-zoom="2">+</button>'
    '<button type="button" data-zoom="0.5">−</button><button type="button" data-zoom="0">whole</button></div>'
)
_MOST_TICKS = 8
"""Most intervals of an axis."""


def _choose_step(whole: float) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that cuts an axis into at most `_MOST_TICKS` parts.

    >>> _choose_step(13.7), _choose_step(0.9)
    (2.0, 0.2)
    """
    size = 10 ** floor(log10(whole / _MOST_TICKS))
    return next(float(factor * size) for factor in (1, 2, 2.5, 5, 10) if factor * size * _MOST_TICKS >= whole)


class Ratio(NamedTuple):
    """A ratio of speeds with its spread: low end, middle, high end."""

    name: str
    low: float
    middle: float
    high: float
    text: str


_TICKS = (0.1, 0.2, 0.25, 0.33, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 10.0)
_LEAST_APART = 0.12
"""Share of an axis below which two ticks' numbers would touch."""


def draw_ratios(ratios: Sequence[Ratio], *, name: str) -> str:
    """HTML of a line for each ratio, all on one log scale; `name` is what the chart is read out as.

    A dot stands at `middle`, a bar goes from `low` to `high`, and a mark stands at ×1, equal speed.
    """
    low = min(0.8, *(ratio.low for ratio in ratios)) / 1.06
    high = max(1.25, *(ratio.high for ratio in ratios)) * 1.06

    def place(value: float) -> float:
        return log(value / low) / log(high / low)

    ticks = [1.0]  # which is always named
    for tick in sorted(_TICKS, key=lambda tick: abs(log(tick))):
        if low <= tick <= high and all(abs(place(tick) - place(other)) >= _LEAST_APART for other in ticks):
            ticks.append(tick)
    labels = [f'<span style="left:{100 * place(tick):.2f}%">×{tick:g}</span>' for tick in sorted(ticks)]
    lines = [f'<div><b></b><span class="axis">{"".join(labels)}</span><em></em></div>']
    for ratio in ratios:
        left, width = 100 * place(ratio.low), 100 * (place(ratio.high) - place(ratio.low))
        kind = ' class="slower"' * (ratio.middle < 1)
        lines.append(
            f'<div><b>{escape(ratio.name)}</b><span class="ratio"><s style="left:{100 * place(1.0):.2f}%"></s>'
            f'<i style="left:{left:.2f}%;width:{width:.2f}%"></i>'
            f'<u{kind} style="left:{100 * place(ratio.middle):.2f}%"></u></span><em>{escape(ratio.text)}</em></div>'
        )
    return _frame(lines, name)


def draw_heat(columns: Sequence[str], rows: Mapping[str, Sequence[float | None]], name: str) -> str:
    """A table of numbers, each on a colour that is stronger the larger it is.

    None is an empty cell; rows and columns that hold None alone are left out.
    """
    filled = [i for i in range(len(columns)) if any(cells[i] is not None for cells in rows.values())]
    columns = [columns[i] for i in filled]
    rows = {row: [cells[i] for i in filled] for row, cells in rows.items() if any(cell is not None for cell in cells)}
    most = max((value for cells in rows.values() for value in cells if value is not None), default=1.0)

    def draw(value: float | None) -> str:
        if value is None:
            return "<td></td>"
        strength = _STRONGEST * value / most
        return (
            f'<td style="background:color-mix(in srgb, var(--accent) {strength:.0f}%, var(--paper))">{value:,.1f}</td>'
        )

    heads = "".join(f"<th>{escape(column)}</th>" for column in ("", *columns))
    lines = "".join(f"<tr><th>{breakable(row)}</th>{''.join(map(draw, cells))}</tr>" for row, cells in rows.items())
    return wide(f'<table class="heat"><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>', name)


def beside(charts: Iterable[str]) -> str:
    """Small charts beside each other, as many as fit."""
    return Markup(f'<div class="grids">{"".join(f"<div>{chart}</div>" for chart in charts)}</div>')
