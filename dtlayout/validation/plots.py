"""Plots of predicted against measured MFU and peak memory: one picture each, a colour a table, log axes.

Only rows with both numbers are drawn. The full line is equality, the band within 10 % of it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # pictures are written, never shown; before pyplot looks for a display

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import GIB
from dtlayout.validation.scores import Prediction, by_table

matplotlib.rcParams["text.parse_math"] = False  # a name with dollars in it is a name

_MOST_NAMED = 20
"""Most tables in the legend; the rest share the colour of its last line."""
_TICKS, _FEWER_TICKS = (1, 1.5, 2, 3, 5, 7), (1, 2, 5)
"""Ticks of each decade; fewer where more than a decade is drawn."""

_COLOURS = [colour for shade in (0, 1) for colour in plt.get_cmap("tab20").colors[shade::2]]  # type: ignore[attr-defined]
"""Ten strong ones, then the same ten pale."""
_LEFT, _SIDE = 0.75, 6.0
"""Inches: room for the numbers, and the square."""


def write_plots(predictions: Sequence[Prediction], folder: str | Path) -> list[Path]:
    """Write mfu.png and memory.png, each only if some row has its number; the files that were written."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(f"--plots={folder} cannot be made a folder: {error.strerror}") from None
    written = []
    for name, title, unit, read in (
        ("mfu", "MFU", "%", _read_mfu),
        ("memory", "Peak memory of pipeline rank 0", "GiB", _read_memory),
    ):
        tables = {table: list(filter(None, map(read, rows))) for table, rows in by_table(predictions).items()}
        if points := {table: pairs for table, pairs in tables.items() if pairs}:
            written.append(folder / f"{name}.png")
            draw_points(points, title, unit, written[-1])
    return written


def _read_mfu(p: Prediction) -> tuple[float, float] | None:
    return (100 * p.run.mfu, 100 * p.estimate.mfu) if p.run.ran and p.run.mfu else None


def _read_memory(p: Prediction) -> tuple[float, float] | None:
    return (p.run.peak_bytes / GIB, p.estimate.memory[0].total / GIB) if p.run.has_peak and p.run.peak_bytes else None


def draw_points(points: Mapping[str, Sequence[tuple[float, float]]], title: str, unit: str, path: Path) -> None:
    """A square of (measured, predicted) by table, above its legend, which takes nothing from it: sizes are inches."""
    values = np.array([value for pairs in points.values() for pair in pairs for value in pair])
    below = 0.75 + 0.175 * (min(len(points), _MOST_NAMED) + 2)
    figure = plt.figure(figsize=(_LEFT + _SIDE + 0.2, below + _SIDE + 0.4))
    width, height = figure.get_size_inches()
    axes = figure.add_axes((_LEFT / width, below / height, _SIDE / width, _SIDE / height))
    draw_equality(
        axes, float(values.min()) / 1.15, float(values.max()) * 1.15, color="0.35", label="predicted = measured"
    )
    for i, (table, pairs) in enumerate(points.items()):
        measured, predicted = zip(*pairs, strict=True)
        colour = _COLOURS[min(i, _MOST_NAMED - 1)]
        label = f"{table}, {len(pairs)} rows" if i < _MOST_NAMED else None
        axes.scatter(measured, predicted, s=14, color=colour, alpha=0.75, linewidth=0, label=label)
    axes.set_title(title, loc="left")
    axes.set_xlabel(f"measured, {unit}")
    axes.set_ylabel(f"predicted, {unit}")
    anchor = (_LEFT / width, (below - 0.5) / height)
    axes.legend(
        loc="upper left", bbox_to_anchor=anchor, bbox_transform=figure.transFigure, fontsize=8, frameon=False,
        markerscale=1.6, borderaxespad=0,
    )  # fmt: skip
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_equality(axes: Axes, low: float, high: float, **line: Any) -> None:
    """Equality as a line in its band of 10 %, on one log scale for both axes with round ticks as plain numbers."""
    ends = np.array([low, high])
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color="0.5", alpha=0.2, linewidth=0, label="within 10 %")
    axes.plot(ends, ends, linewidth=1, **line)
    of_decade = _TICKS if high / low < 20 else _FEWER_TICKS
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in of_decade]
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
