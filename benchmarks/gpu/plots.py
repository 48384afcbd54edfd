"""Pictures of the report: MFU by factor, and predicted against measured."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure  # without pyplot, which looks for a display

from benchmarks.gpu.cells import Training
from benchmarks.gpu.rows import Row, find_trained
from benchmarks.gpu.suites import Suite
from dtlayout.base.formatting import GIB
from dtlayout.validation.plots import draw_points

NUM_COLUMNS = 2
BASE_COLOUR, COLOUR = "tab:blue", "0.7"


def draw_mfu(suite: Suite, rows: Sequence[Row], path: Path) -> None:
    """A panel for each model of the ablation, a bar for each change of one kernel; FLOP/s where there is no peak."""
    wanted = {cell for name in ("blocks", "models", "kernels") for cell in suite.groups.get(name, ())}
    panels: dict[str, dict[str, float]] = defaultdict(dict)
    by_peak = any(row.peak_flops_per_s for row in rows)
    for cell, measured, _ in find_trained(rows):
        if cell in wanted:
            value = 100 * (measured.mfu or 0) if by_peak else measured.model_tflops_per_gpu
            panels[f"{cell.subject}, sequence {cell.seq_len}"][describe_bar(cell)] = value
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


def draw_predictions(rows: Sequence[Row], step_path: Path, memory_path: Path) -> None:
    """Step time and peak memory, predicted against measured, a colour for each model."""
    steps, peaks = (defaultdict[str, list[tuple[float, float]]](list) for _ in range(2))
    for cell, measured, predicted in find_trained(rows):
        if predicted:
            steps[cell.subject].append((measured.step_time_s, predicted.step_time_s))
            peaks[cell.subject].append((measured.peak_memory_bytes / GIB, predicted.peak_bytes / GIB))
    if steps:
        draw_points(steps, "Step time", "s", step_path)
        draw_points(peaks, "Peak memory", "GiB", memory_path)
