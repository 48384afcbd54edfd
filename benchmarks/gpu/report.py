"""The report: tables for people, all numbers as JSON, and pictures where matplotlib is there."""

import json
import platform
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from benchmarks.gpu.cells import Suite, Training
from benchmarks.gpu.rows import Reached, Row, Status, Trained
from benchmarks.gpu.training import PRECISION
from dtlayout.training.metrics import write_whole

GIB = 2**30
DRAW_EVERY_S = 20
"""Pictures are drawn anew so often and at the end: drawing them takes as long as a small cell."""
CEILING_HEADER = "| operation | time, ms | reached | of the data sheet | result |\n|---|--:|--:|--:|---|"
TRAINING_HEADER = (
    "| model | sequence | micro-batch | recompute | kernels | tokens/s | MFU | step, s | predicted | ratio "
    "| peak, GiB | predicted | ratio | attention | result |\n"
    "|---|--:|--:|---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|---|"
)
UNITS = {"TFLOP/s": 1e12, "GB/s": 1e9}
TITLES = {
    "ceilings": "What one operation reaches",
    "blocks": "Decoder layers alone, one kernel at a time",
    "kernels": "Whole models, one kernel at a time",
    "sweep": "Micro-batch and recomputation",
}


class Report:
    """FOLDER/bench_gpu-DEVICE.md, .json and pictures, written again with every row."""

    def __init__(self, folder: Path, command: str, suite: Suite):
        self.folder = folder
        self.command = command
        self.suite = suite
        self.rows: list[Row] = []
        self._draw_after = 0.0
        self._header = ""

    def add(self, row: Row) -> None:
        """Print a row, with a header where another table begins, and write all again."""
        self.rows.append(row)
        if (header := header_of(row)) != self._header:
            print(header)
            self._header = header
        print(show(row), flush=True)
        self.write()
        if time.monotonic() > self._draw_after:
            self.draw()

    @property
    def path(self) -> Path:
        """Of all its files, without what differs."""
        return self.folder / f"bench_gpu-{re.sub('[^a-z0-9]+', '-', self.device.lower())}"

    @property
    def device(self) -> str:
        """What torch calls it."""
        return next((row.device for row in self.rows if row.device), "unknown device")

    def write(self) -> None:
        """Write the tables and the JSON."""
        facts = {
            "command": self.command,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "device": self.device,
            "peak_flops_per_s": next((row.peak_flops_per_s for row in self.rows if row.peak_flops_per_s), None),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "numpy": np.__version__,
            "precision": asdict(PRECISION),
            "timed_steps": self.suite.num_steps,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        text = "\n".join((*self._introduce(facts), *self._tables()))
        _write(self.path, ".md", text + "\n")
        _write(self.path, ".json", json.dumps(facts | {"rows": [row.flatten() for row in self.rows]}, indent=2) + "\n")

    def draw(self) -> None:
        """Draw the pictures, where matplotlib is installed and there is something to see."""
        self._draw_after = time.monotonic() + DRAW_EVERY_S
        if find_spec("matplotlib"):
            from benchmarks.gpu.plots import draw_mfu, draw_predictions

            draw_mfu(self.suite, self.rows, self.path.with_name(f"{self.path.name}-mfu.png"))
            draw_predictions(self.rows, self.path.with_name(f"{self.path.name}-predicted.png"))

    def _introduce(self, facts: dict[str, Any]) -> Iterator[str]:
        peak = facts["peak_flops_per_s"]
        yield f"# One GPU: {facts['device']}"
        yield ""
        yield f"`{self.command}`, {facts['date']}"
        yield ""
        yield (
            f"Python {facts['python']}, torch {facts['torch']}, CUDA {facts['cuda'] or 'none'}, numpy "
            f"{facts['numpy']}; bf16 compute, fp32 masters and gradients, fused AdamW, a world of one rank."
        )
        yield (
            f"A step's time is the median of {facts['timed_steps']}, after two that warm up. MFU is tokens/s · "
            f"(6N + 12·L·h·s) / peak; "
            + (f"the peak is {peak / 1e12:g} TFLOP/s." if peak else "this device's peak is not known.")
        )
        yield (
            "Blocks are decoder layers without embedding and head, and N counts them alone; so many as leave 10 % of "
            "an H200's memory free by prediction with sdpa-math. "
            "Ratios are predicted over measured."
        )
        yield from _summarise(self.rows)
        if find_spec("matplotlib"):
            yield f"Pictures: {self.path.name}-mfu.png and {self.path.name}-predicted.png."
        else:
            yield "Pictures: none, since matplotlib is not installed here."

    def _tables(self) -> Iterator[str]:
        """A table for each group; a row stands in all groups that its cell belongs to."""
        for name, cells in self.suite.groups.items():
            if rows := [row for cell in cells for row in self.rows if row.cell == cell]:
                yield from ("", f"## {TITLES[name]}", "", header_of(rows[0]), *map(show, rows))
        if reasons := {row.not_predicted for row in self.rows if row.not_predicted}:
            yield from ("", *(f"Not predicted: {reason}" for reason in sorted(reasons)))


def header_of(row: Row) -> str:
    """The head of the table that a row belongs to."""
    return TRAINING_HEADER if isinstance(row.cell, Training) else CEILING_HEADER


def show(row: Row) -> str:
    """A row of a Markdown table."""
    note = row.note.replace("|", "/")[:100]
    columns = [*_columns(row), f"{row.status}: {note}" if note else row.status]
    return f"| {' | '.join(columns)} |"


def _columns(row: Row) -> Iterator[str]:
    """What stands left of the result."""
    cell = row.cell
    if not isinstance(cell, Training):
        reached = row.measured if isinstance(row.measured, Reached) else None
        yield str(cell)
        yield _form(reached, lambda r: 1e3 * r.median_s, ".3f")
        yield _form(reached, lambda r: r.per_second / UNITS[cell.unit], ".4g", cell.unit)
        yield _form(reached, lambda r: r.share, ".1%")
        return
    trained = row.measured if isinstance(row.measured, Trained) else None
    yield from (cell.subject, str(cell.seq_len), str(cell.micro_batch), cell.recompute, cell.variant)
    yield _form(trained, lambda t: t.tokens_per_s, ",.0f")
    yield _form(trained, lambda t: t.mfu, ".1%")
    yield _form(trained, lambda t: t.step_time_s, ".3f")
    yield _form(row.predicted, lambda p: p.step_time_s, ".3f")
    yield _form(step_ratio(row), float, ".2f")
    yield _form(trained, lambda t: t.peak_memory_bytes / GIB, ".2f")
    yield _form(row.predicted, lambda p: p.peak_bytes / GIB, ".2f")
    yield _form(memory_ratio(row), float, ".2f")
    yield ", ".join(trained.attention_kernels if trained else ()) or "n/a"


def step_ratio(row: Row) -> float | None:
    """Predicted over measured step time."""
    if row.predicted is None or not isinstance(row.measured, Trained):
        return None
    return row.predicted.step_time_s / row.measured.step_time_s


def memory_ratio(row: Row) -> float | None:
    """Predicted over measured peak memory."""
    if row.predicted is None or not isinstance(row.measured, Trained):
        return None
    return row.predicted.peak_bytes / row.measured.peak_memory_bytes


def _summarise(rows: Iterable[Row]) -> Iterator[str]:
    """How far off predictions are, once there are some."""
    steps = [ratio for row in rows if (ratio := step_ratio(row)) is not None]
    peaks = [ratio for row in rows if (ratio := memory_ratio(row)) is not None]
    if steps:
        step, peak = (statistics.median(abs(ratio - 1) for ratio in ratios) for ratios in (steps, peaks))
        yield f"Predictions of {len(steps)} rows are off by {step:.0%} in step time and {peak:.0%} in memory (median)."


def _form(value: Any, part: Callable[[Any], float | None], spec: str, unit: str = "") -> str:
    """A part of a value, or n/a where there is no value or no such part."""
    number = None if value is None else part(value)
    return "n/a" if number is None else f"{number:{spec}} {unit}".rstrip()


def _write(path: Path, suffix: str, text: str) -> None:
    write_whole(path.with_name(path.name + suffix), text)


def count_by_status(rows: Sequence[Row]) -> str:
    """The last line that is printed."""
    found = Counter(row.status for row in rows)
    return ", ".join(f"{found[status]} {status}" for status in get_args(Status) if found[status])
