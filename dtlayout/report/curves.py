"""Curves of runs over their steps: loss, speed and memory of several runs in one picture each, and a page of them all.

A run is a folder with metrics.jsonl, done or going on. What is noisy is drawn pale, with its exponential mean over it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dtlayout.base.errors import DtlayoutError
from dtlayout.base.files import parse_json
from dtlayout.base.formatting import choose_unit
from dtlayout.config.loading import load_config
from dtlayout.report import html
from dtlayout.training.metrics import Validation, read_summary, time_steps

_MEAN_SHARE, _LEAST_MEAN, _EARLIER = 50, 3.0, 10
"""Steps that a mean reaches over by default: steps of the longest run / `_MEAN_SHARE`, at least `_LEAST_MEAN`. Early in
a run it reaches over at most the steps so far / `_EARLIER`."""
_MOST_VECTORS = 2000
"""Number of points from which on a noisy line is drawn as pixels."""
_MOST_NAMED = 3
"""Most runs that a title names."""
_MARKERS = "os^DvPX"
"""Markers that tell the validation curves of a run apart, which have its colour."""
_DESK, _PHONE = (9.0, 3.6), (4.2, 3.2)
"""Inches of a picture for a page on a desk, and for one of 400 pixels."""
_TAIL = 10
"""Steps at the end whose mean is the final loss, as in summary.json."""


@dataclass(frozen=True, kw_only=True)
class RunCurves:
    """Everything that one run has written down so far."""

    name: str
    outcome: str
    """Outcome of the run, as summary.json has it; "" if that is not known."""
    layout: str
    """Layout of the last step, in words; "" if that is not known."""
    lines: list[dict[str, Any]]
    """Lines of metrics.jsonl from step 1 on, in the order of their steps."""
    start: Mapping[str, Any] = field(default_factory=dict)
    """Line of step 0, which has validation losses alone; empty where none were measured before the first step."""
    num_torn: int
    """Lines of metrics.jsonl that cannot be read."""

    def read(self, key: str) -> tuple[list[int], list[float]]:
        """Steps, and a number of StepMetrics at each of those that have it."""
        found = [(line["step"], line[key]) for line in self.lines if _is_number(line.get(key))]
        return [step for step, _ in found], [value for _, value in found]

    def list_validation(self) -> list[tuple[str, list[int], list[float]]]:
        """Name, steps and losses of each validation curve; the name of the run's own one, without a named set, is "".

        The run's own loss is left out where it is that of a named set all along.
        """
        lines = [self.start, *self.lines] if self.start else self.lines
        own, named = dict[int, float](), dict[str, dict[int, float]]()
        for line in lines:
            if _is_number(line.get("validation_loss")):
                own[line["step"]] = line["validation_loss"]
            sets = line.get("validation_losses")
            for name, each in sets.items() if isinstance(sets, dict) else ():
                if _is_number(each):
                    named.setdefault(name, {})[line["step"]] = each
        curves = named if own in named.values() else {"": own, **named}
        return [(name, [*curve], [*curve.values()]) for name, curve in curves.items() if curve]

    @property
    def resumes(self) -> list[int]:
        """First steps of starts that went on from a checkpoint, under the same layout or another one."""
        changes = {part.lines[0]["step"] for part in self.parts[1:]}
        return sorted(changes | {line["step"] for line in self.lines if line.get("resumed")})

    @property
    def parts(self) -> list["RunCurves"]:
        """The run cut where it was resumed under another layout; each part but the last is "resumed"."""
        groups = [(layout, list(lines)) for layout, lines in groupby(self.lines, lambda line: line.get("layout", ""))]
        if len(groups) < 2:
            return [self]
        outcomes = ["resumed"] * (len(groups) - 1) + [self.outcome]
        starts = [self.start, *({} for _ in outcomes[1:])]
        return [
            replace(self, outcome=outcome, layout=str(layout), lines=lines, start=start)
            for outcome, start, (layout, lines) in zip(outcomes, starts, groups, strict=True)
        ]


def read_runs(folders: Sequence[Path]) -> list[RunCurves]:
    """The runs in these folders; DtlayoutError if one is no run, or none has done a step."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    runs = [_read_run(folder, name) for folder, name in zip(folders, names, strict=True)]
    if not any(run.lines for run in runs):
        raise DtlayoutError(f"{', '.join(names)}: no step is done yet, so there is nothing to draw")
    return runs


def _read_run(folder: Path, name: str) -> RunCurves:
    metrics, config = folder / "metrics.jsonl", folder / "config.toml"
    if not metrics.is_file() and not config.is_file():
        raise DtlayoutError(f"{folder} is no run: it has neither metrics.jsonl nor config.toml")
    lines, start, num_torn = dict[int, dict[str, Any]](), dict[str, Any](), 0
    try:
        text = metrics.read_text(encoding="utf-8", errors="replace") if metrics.is_file() else ""
    except OSError as error:
        raise DtlayoutError(f"{metrics} cannot be read: {error.strerror}") from None
    for raw in text.splitlines():
        try:
            line = parse_json(raw)
            step = line["step"]
            is_torn = step < 0
        except (ValueError, KeyError, TypeError):
            is_torn = True
        if is_torn:
            num_torn += 1
        elif step > 0:
            lines[step] = line
        else:
            start = line
    try:
        found = load_config(config).layout
        layout = str(found.resolve(found.smallest_world_size))
    except DtlayoutError:  # none, or of another version
        layout = ""
    in_order = [lines[step] for step in sorted(lines)]
    return RunCurves(
        name=name, outcome=str(read_summary(folder).get("outcome", "")),
        layout=str((in_order[-1].get("layout") if in_order else "") or layout), lines=in_order, start=start,
        num_torn=num_torn,
    )  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def smooth(values: Sequence[float], num_steps: float) -> list[float]:
    """Exponential means that reach over so many values, and over no more than a tenth of those so far.

    A loss falls fast at first: there a mean over many would lie far above it.

    >>> smooth([8.0, 4.0, 2.0], 50), smooth([1.0] * 30 + [2.0], 2)[-1]
    ([8.0, 4.0, 2.0], 1.5)
    """
    means: list[float] = []
    for i, value in enumerate(values, 1):
        share = 1 / max(1.0, min(num_steps, i / _EARLIER))
        means.append(share * value + (1 - share) * (means[-1] if means else value))
    return means


class Curves:
    """Pictures and a table of some runs."""

    def __init__(self, runs: Sequence[RunCurves], smooth_steps: float | None = None):
        """`smooth_steps`: how far means reach; by default a fiftieth of the longest run, and 3."""
        self.runs = [run for run in runs if run.lines]
        self.without_steps = [run.name for run in runs if not run.lines]
        self.num_torn = sum(run.num_torn for run in runs)
        longest = max(len(run.lines) for run in self.runs)
        self._size = _DESK
        self.smooth_steps = max(_LEAST_MEAN, longest / _MEAN_SHARE) if smooth_steps is None else smooth_steps

    @property
    def title(self) -> str:
        """Title that names the runs that are drawn."""
        names = [run.name for run in self.runs]
        return ", ".join(names) if len(names) <= _MOST_NAMED else f"{len(names)} runs"

    @property
    def notes(self) -> list[str]:
        """Sentences on facts that the pictures do not show."""
        notes = []
        if self.smooth_steps > 1:
            reach = f"{self.smooth_steps:g} steps, at first over fewer"
            notes.append(f"Strong lines are exponential means of the pale ones, over {reach}.")
        if self.without_steps:
            notes.append(f"Without a step yet: {', '.join(self.without_steps)}.")
        for run in self.runs:
            changes = [f"from step {part.lines[0]['step']:,} as {part.layout or '?'}" for part in run.parts[1:]]
            if changes:
                notes.append(f"{run.name} was resumed {', '.join(changes)}, where a dashed line stands.")
            if others := sorted({*run.resumes} - {part.lines[0]["step"] for part in run.parts[1:]}):
                steps = ", ".join(f"{step:,}" for step in others)
                notes.append(f"{run.name} went on from a checkpoint at step {steps}, where a dotted line stands.")
        if self.num_torn:
            notes.append(f"Lines of metrics.jsonl that cannot be read and are left out: {self.num_torn}.")
        return notes

    def draw(self, inches: tuple[float, float] = _DESK) -> Iterator[tuple[str, str, Figure]]:
        """A short name, a title and a figure of each quantity that some run has measured, in a size."""
        self._size = inches
        yield "loss", "Loss", self._draw_loss()
        if any(run.read("grad_norm")[1] for run in self.runs):
            yield "grad_norm", "Gradient norm before clipping", self._draw_line("grad_norm", "norm", 1.0)
        if any(run.read("lr")[1] for run in self.runs):
            yield "lr", "Learning rate", self._draw_points("lr", "learning rate")
        yield "speed", "Speed", self._draw_line("tokens_per_s", "tokens/s", 1.0)
        if any(run.read("mfu")[1] for run in self.runs):
            yield "mfu", "Model FLOPs utilization", self._draw_line("mfu", "MFU, %", 0.01)
        if peaks := [peak for run in self.runs for peak in run.read("peak_memory_bytes")[1]]:
            unit, size = choose_unit(max(peaks))
            yield "memory", "Peak memory of the fullest rank", self._draw_peaks(unit, size)

    def list_rows(self) -> list[list[str]]:
        """A row for each run, or for each layout that it ran as, below the columns that some run has measured.

        A cell is empty where that run has not.
        """
        rows = [_describe(part, len(run.parts) > 1) for run in self.runs for part in run.parts]
        columns = [name for name in rows[0] if any(row[name] for row in rows)]
        return [columns, *([row[name] for name in columns] for row in rows)]

    def write_page(self, path: Path) -> None:
        """Write table and pictures as one page; DtlayoutError if it cannot be written."""
        parts = [html.paragraph(note, "note") for note in self.notes]
        parts.append(html.table(self.list_rows(), "runs"))
        for_phones = Curves(self.runs, self.smooth_steps)  # which has another size at the same time
        for (_, title, wide), (_, _, narrow) in zip(self.draw(), for_phones.draw(_PHONE), strict=True):
            parts.append(html.heading(title) + html.picture(wide, title, narrow))
        html.write_page(path, self.title, parts)

    def write_pictures(self, folder: Path) -> list[Path]:
        """Write a PNG of each; the files. DtlayoutError if they cannot be written."""
        written = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, title, figure in self.draw():
                figure.suptitle(title, x=0.01, ha="left", fontsize=11)
                written.append(folder / f"{name}.png")
                figure.savefig(written[-1], dpi=150)
                plt.close(figure)
        except OSError as error:
            raise DtlayoutError(f"pictures in {folder} cannot be written: {error.strerror}") from None
        return written

    def _draw_loss(self) -> Figure:
        figure, axes = self._begin("nats per token")
        for colour, run in self._coloured():
            self._draw_mean(axes, *run.read("loss"), colour, run.name)
            for i, (name, steps, losses) in enumerate(run.list_validation()):
                axes.plot(
                    steps, losses, color=colour, marker=_MARKERS[i % len(_MARKERS)], markersize=4, linewidth=1,
                    linestyle=(0, (4, 2)), markerfacecolor="white", label=f"{run.name}, validation {name}".rstrip(),
                )  # fmt: skip
        return _end(figure)

    def _draw_line(self, key: str, unit: str, size: float) -> Figure:
        figure, axes = self._begin(unit)
        for colour, run in self._coloured():
            steps, values = run.read(key)
            if steps:
                self._draw_mean(axes, steps, [value / size for value in values], colour, run.name)
        axes.set_ylim(bottom=0)
        return _end(figure)

    def _draw_points(self, key: str, unit: str) -> Figure:
        """A quantity that is not noisy, as it is."""
        figure, axes = self._begin(unit)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        for colour, run in self._coloured():
            steps, values = run.read(key)
            if steps:
                marker = "o" if len(steps) == 1 else None
                axes.plot(steps, values, color=colour, linewidth=1.4, marker=marker, markersize=4, label=run.name)
        axes.set_ylim(bottom=0)
        return _end(figure)

    def _draw_peaks(self, unit: str, size: int) -> Figure:
        figure, axes = self._begin(unit)
        for colour, run in self._coloured():
            steps, peaks = run.read("peak_memory_bytes")
            if steps:
                heights = [peak / size for peak in peaks]
                axes.plot(steps, heights, color=colour, marker="o", markersize=4, linewidth=1.2, label=run.name)
        axes.margins(y=0.1)
        axes.set_ylim(bottom=0)
        return _end(figure)

    def _draw_mean(self, axes: Axes, steps: Sequence[int], values: Sequence[float], colour: Any, label: str) -> None:
        """Draw measured values, pale, and their mean; a single step is a point."""
        if self.smooth_steps > 1 and len(steps) > 1:
            is_long = len(steps) > _MOST_VECTORS
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8, rasterized=is_long)
        marker = "o" if len(steps) == 1 else None
        means = smooth(values, self.smooth_steps)
        every = -(-len(steps) // _MOST_VECTORS)
        shown = [i for i in range(len(steps)) if i % every == 0 or i == len(steps) - 1]
        axes.plot(
            [steps[i] for i in shown], [means[i] for i in shown], color=colour, linewidth=1.6, marker=marker,
            markersize=4, label=label,
        )  # fmt: skip

    def _begin(self, unit: str) -> tuple[Figure, Axes]:
        figure, axes = plt.subplots(figsize=self._size, layout="constrained")
        axes.set(xlabel="step", ylabel=unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9 if self._size == _DESK else 4))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,.12g}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.92", linewidth=0.6)
        axes.set_axisbelow(True)
        self._mark_resumes(axes)
        return figure, axes

    def _mark_resumes(self, axes: Axes) -> None:
        """A thin line in the run's colour where a start went on: dashed under another layout, dotted under the same."""
        for colour, run in self._coloured():
            changes = {part.lines[0]["step"] for part in run.parts[1:]}
            for step in run.resumes:
                dashes = (4, 2) if step in changes else (1, 2)
                axes.axvline(step, color=colour, linewidth=0.8, linestyle=(0, dashes))

    def _coloured(self) -> Iterator[tuple[Any, RunCurves]]:
        """Pairs of a run and its colour, which is the same in every picture."""
        return ((html.LINES[i % len(html.LINES)], run) for i, run in enumerate(self.runs))


def _end(figure: Figure) -> Figure:
    """Finish a figure: put a legend above it, in as many columns as fit."""
    (axes,) = figure.axes
    axes.set_xlim(left=0)
    _, labels = axes.get_legend_handles_labels()
    letters = int(12 * figure.get_figwidth())
    columns = max(1, min(len(labels), letters // (max(map(len, labels)) + 6)))
    figure.legend(loc="outside upper right", fontsize=8, ncols=columns, frameon=False)
    return figure


def count_tokens_per_step(lines: Sequence[Mapping[str, Any]]) -> float:
    """Tokens of a step, as between the last two lines, for batches before them may have been smaller.

    >>> count_tokens_per_step([{"step": 5, "tokens": 80}, {"step": 6, "tokens": 112}])
    32.0
    """
    (*others, last) = ((line["step"], line.get("tokens", 0)) for line in lines[-2:])
    steps, tokens = (b - a for a, b in zip(others[0], last, strict=True)) if others else last
    return tokens / steps if steps > 0 else last[1] / last[0]


def _list_times(lines: Sequence[Mapping[str, Any]], tokens: float) -> list[float]:
    """Seconds of the steps that have so many tokens: a ramp has smaller ones; of all where no step says its speed."""
    timed = [(line["step_time_s"], line.get("tokens_per_s")) for line in lines if line.get("step_time_s") is not None]
    return [t for t, speed in timed if speed and round(speed * t) == round(tokens)] or [t for t, _ in timed]


def _describe(run: RunCurves, is_part: bool) -> dict[str, str]:
    """Column → cell of a run, or of a part of one, which names its first step too."""
    losses, mfu, peaks = (run.read(key)[1] for key in ("loss", "mfu", "peak_memory_bytes"))
    validation = Validation.of([run.start, *run.lines])
    tokens = count_tokens_per_step(run.lines)
    step_time_s, _ = time_steps(_list_times(run.lines, tokens))
    steps = f"{run.lines[0]['step']:,} to " * is_part + f"{run.lines[-1]['step']:,}"
    unit, size = choose_unit(max(peaks, default=0))

    def show(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    last = losses[-_TAIL:]
    return {
        "run": run.name, "layout": run.layout, "outcome": run.outcome, "steps": steps,
        "loss": show(sum(last) / len(last) if last else None, ".4f"),
        "validation": show(validation.last if validation else None, ".4f"),
        "best": show(validation.best if validation else None, ".4f"),
        "tokens/s": show(tokens / step_time_s if step_time_s else None, ",.0f"),
        "MFU": show(median(mfu) if mfu else None, ".1%"),
        "peak memory": f"{max(peaks) / size:.2f} {unit}" if peaks else "",
    }  # fmt: skip
