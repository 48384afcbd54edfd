"""Pictures of the report: MFU by factor, and predicted against measured."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # without pyplot, which looks for a display

from benchmarks.gpu.cells import Training
from benchmarks.gpu.rows import Row, Trained
from benchmarks.gpu.suites import Suite
from dtlayout.base.formatting import GIB
from dtlayout.validation.plots import draw_equality

NUM_COLUMNS = 2
BASE_COLOUR, COLOUR = "tab:blue", "0.7"


def draw_mfu(suite: Suite, rows: Sequence[Row], path: Path) -> None:
    """A panel for each model of the ablation, a bar for each change of one kernel; FLOP/s where there is no peak."""
    wanted = {cell for name in ("blocks", "models", "kernels") for cell in suite.groups.get(name, ())}
    panels: dict[str, dict[str, float]] = defaultdict(dict)
    by_peak = any(row.peak_flops_per_s for row in rows)
    for row in rows:
        if isinstance(row.cell, Training) and row.cell in wanted and isinstance(row.measured, Trained):
            value = 100 * (row.measured.mfu or 0) if by_peak else row.measured.model_tflops_per_gpu
            panels[f"{row.cell.subject}, sequence {row.cell.seq_len}"][describe_bar(row.cell)] = value
    if not panels:
        return
    num_rows = -(-len(panels) // NUM_COLUMNS)
    figure = Figure(figsize=(7 * NUM_COLUMNS, 2.6 * num_rows), layout="constrained")
    for i, (title, values) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(num_rows, NUM_COLUMNS, i)
        names = list(values)[::-1]  # bars grow upwards
        colours = [BASE_COLOUR if name == "base" else COLOUR for name in names]
        bars = axes.barh(names, [values[name] for name in names], color=colours)
        axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("MFU, %" if by_peak else "model TFLOP/s")
        axes.margins(x=0.2)
    figure.savefig(path, dpi=110)


def describe_bar(cell: Training) -> str:
    """Name of a bar: all that differs from the base, recomputation included."""
    return cell.variant + f", recompute={cell.recompute}" * (cell.recompute != "none")


def draw_predictions(rows: Sequence[Row], path: Path) -> None:
    """Step time and peak memory, a colour for each model; the band is within 10 %."""
    steps: dict[str, list[tuple[float, float]]] = defaultdict(list)
    peaks: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if isinstance(row.cell, Training) and isinstance(row.measured, Trained) and row.predicted:
            steps[row.cell.subject].append((row.measured.step_time_s, row.predicted.step_time_s))
            peaks[row.cell.subject].append((row.measured.peak_memory_bytes / GIB, row.predicted.peak_bytes / GIB))
    if not steps:
        return
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_points(left, steps, "step, s")
    _draw_points(right, peaks, "peak memory, GiB")
    left.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def _draw_points(axes: Axes, points: dict[str, list[tuple[float, float]]], unit: str) -> None:
    values = [value for pairs in points.values() for pair in pairs for value in pair]
    draw_equality(axes, min(values) / 1.15, max(values) * 1.15, color="0.4")
    for name, pairs in points.items():
        measured, predicted = zip(*pairs, strict=True)
        axes.scatter(measured, predicted, s=18, label=name)
    axes.set(xlabel=f"measured {unit}", ylabel=f"predicted {unit}")
