"""The report: tables for people, constants of the cost model, and pictures where matplotlib is there.

It is made from the rows alone, so that it can be written again wherever they are.
"""

import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from benchmarks.gpu.calibration import PACKAGES, derive, find_measured
from benchmarks.gpu.cells import Calibration, Ceiling, Cell, Check, HostTime, Training
from benchmarks.gpu.predict import predict
from benchmarks.gpu.rows import Checked, HostTimes, Reached, Row, Status, Trained
from benchmarks.gpu.suites import Suite
from dtlayout.base.files import write_whole
from dtlayout.calibrate.file import to_toml
from dtlayout.calibrate.measured import Measured
from dtlayout.spec.cluster import Cluster

GIB = 2**30
DRAW_EVERY_S = 60
"""Pictures are drawn anew so often and at the end: drawing them takes as long as a small cell."""
UNITS = {"TFLOP/s": 1e12, "GB/s": 1e9}
TITLES = {
    "checks": "Is it right? Against float64 on the CPU, and bit by bit",
    "memory": "Peaks of memory",
    "blocks": "Decoder layers alone",
    "models": "Whole models",
    "host": "What the host takes of a layer and microbatch",
    "constants": "Constants",
    "ceilings": "What one operation reaches",
    "kernels": "One kernel at a time",
    "sweep": "Micro-batch and recomputation",
}
_CHECK_HEADER = "| check | error | limit | whose | ran | result |\n|---|--:|--:|---|---|---|"
_CEILING_HEADER = "| operation | time, ms | reached | of the data sheet | result |\n|---|--:|--:|--:|---|"
_TRAINING_HEADER = (
    "| model | sequence | micro-batch | recompute | kernels | tokens/s | MFU | step, s | predicted | ratio "
    "| peak, GiB | predicted | ratio | attention | result |\n"
    "|---|--:|--:|---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|---|"
)
_HOST_HEADER = "| what | ms | result |\n|---|--:|---|"
_CALIBRATION_HEADER = "| what | matmuls | attention | steps | result |\n|---|--:|--:|--:|---|"


class Report:
    """FOLDER/bench_gpu-DEVICE.md, its constants and pictures; the page is written again with every row."""

    def __init__(self, folder: Path, device: str, torch: str, suite: Suite, rows: Sequence[Row]):
        self.path = folder / f"bench_gpu-{re.sub('[^a-z0-9]+', '-', device.lower())}"
        """Of all its files, without what differs."""
        self.device = device
        self.torch = torch
        self.suite = suite
        self.rows = list(rows)
        self._constants: list[str] = []
        self._draw_after = 0.0
        self._header = ""

    @property
    def latest(self) -> list[Row]:
        """Of each cell the last row."""
        return list({row.cell: row for row in self.rows}.values())

    def add(self, row: Row) -> None:
        """Print a row, with a header where another table begins, and write all again."""
        self.rows.append(row)
        if (header := header_of(row.cell)) != self._header:
            print(header)
            self._header = header
        print(show(row), flush=True)
        self.write()
        if time.monotonic() > self._draw_after:
            self.draw()

    def finish(self) -> None:
        """Derive constants, draw, and write all for the last time of a call."""
        self._constants = list(self._derive())
        self.draw()
        self.write()

    def write(self) -> None:
        """Write the page."""
        _write(self.path, ".md", "\n".join((*self._introduce(), *self._tables(), *self._constants)) + "\n")

    def draw(self) -> None:
        """Draw the pictures, where matplotlib is installed and there is something to see."""
        self._draw_after = time.monotonic() + DRAW_EVERY_S
        if find_spec("matplotlib"):
            from benchmarks.gpu.plots import draw_mfu, draw_predictions

            draw_mfu(self.suite, self.latest, self.path.with_name(f"{self.path.name}-mfu.png"))
            draw_predictions(self.latest, self.path.with_name(f"{self.path.name}-predicted.png"))

    def _introduce(self) -> Iterator[str]:
        peak = next((row.peak_flops_per_s for row in self.rows if row.peak_flops_per_s), None)
        yield f"# One GPU: {self.device}"
        yield ""
        yield (
            f"`make bench-gpu`, {datetime.now(timezone.utc):%Y-%m-%d}, torch {self.torch}; bf16 compute, fp32 masters "
            f"and gradients, fused AdamW, a world of one rank."
        )
        yield ""
        yield from (f"- {line}" for line in summarise(self.latest))
        yield ""
        yield (
            f"A step's time is the median of {self.suite.num_steps}, after two that warm up. MFU is tokens/s · "
            f"(6N + 12·L·h·s) / peak; "
            + (f"the peak is {peak / 1e12:g} TFLOP/s." if peak else "this device's peak is not known.")
        )
        yield (
            "Blocks are decoder layers without embedding and head, and N counts them alone. The base is "
            "sdpa-flash, the fused norm and the chunked loss, not compiled. Ratios are predicted over measured."
        )
        if find_spec("matplotlib"):
            yield f"Pictures, which `--report` draws: {self.path.name}-mfu.png and {self.path.name}-predicted.png."
        else:
            yield "Pictures: none, since matplotlib is not installed here."

    def _tables(self) -> Iterator[str]:
        """A table for each group; a row stands in all groups that its cell belongs to."""
        rows = {row.cell: row for row in self.latest}
        for name, cells in self.suite.groups.items():
            if found := [rows[cell] for cell in cells if cell in rows]:
                yield from ("", f"## {TITLES[name]}", "", header_of(found[0].cell), *dict.fromkeys(map(show, found)))
        if reasons := {row.not_predicted for row in rows.values() if row.not_predicted}:
            yield from ("", *(f"Not predicted: {reason}" for reason in sorted(reasons)))

    def _derive(self) -> Iterator[str]:
        """Constants, and how far predictions are off with them."""
        measured = find_measured(self.latest)
        if measured is None:
            return
        json_path = self.path.with_name(f"{self.path.name}-measured.json")
        measured.write(json_path)
        yield from ("", "## Constants of the cost model", "")
        if missing := [name for name in PACKAGES if find_spec(name) is None]:
            yield (
                f"None are fitted without {' and '.join(missing)}; `python -m benchmarks.gpu --report` "
                f"does it elsewhere, or `dtlayout calibrate --measured {json_path.name} --out FILE`."
            )
            return
        try:
            cluster = derive(measured, self.latest)
        except Exception as error:  # the page is worth more than its last section
            print(f"no constants: {type(error).__name__}: {error}", file=sys.stderr)
            yield f"None could be fitted: {type(error).__name__}."
            return
        text = to_toml(measured, cluster)
        _write(self.path, ".toml", text)
        yield from describe_fit(self.latest, cluster)
        yield from ("", f"A cluster file, {self.path.name}.toml:", "", "```toml", text.strip(), "```")


def header_of(cell: Cell) -> str:
    """The head of the table that a cell's row belongs to."""
    match cell:
        case Training():
            return _TRAINING_HEADER
        case HostTime():
            return _HOST_HEADER
        case Calibration():
            return _CALIBRATION_HEADER
    return _CHECK_HEADER if isinstance(cell, get_args(Check)) else _CEILING_HEADER


def show(row: Row) -> str:
    """A row of a Markdown table."""
    note = row.note.replace("|", "/")[:160]
    columns = [*_columns(row), f"{row.status}: {note}" if note else row.status]
    return f"| {' | '.join(columns)} |"


def _columns(row: Row) -> Iterator[str]:
    """What stands left of the result."""
    cell, measured = row.cell, row.measured
    if isinstance(cell, Training):
        yield from _training_columns(row, cell, measured if isinstance(measured, Trained) else None)
    elif isinstance(cell, HostTime):
        yield str(cell)
        yield _form(measured if isinstance(measured, HostTimes) else None, lambda h: 1e3 * h.layer_s, ".2f")
    elif isinstance(cell, Calibration):
        yield str(cell)
        for name in ("matmuls", "attention", "probes"):
            yield str(len(getattr(measured, name))) if isinstance(measured, Measured) else "n/a"
    elif isinstance(cell, get_args(Check)):
        checked = measured if isinstance(measured, Checked) else None
        yield str(cell)
        yield _form(checked, lambda c: c.error, ".1e")
        yield _form(checked, lambda c: c.limit, ".0e")
        yield checked.where if checked else "n/a"
        yield ", ".join(checked.ran if checked else ()) or "n/a"
    elif isinstance(cell, get_args(Ceiling)):
        reached = measured if isinstance(measured, Reached) else None
        yield str(cell)
        yield _form(reached, lambda r: 1e3 * r.median_s, ".3f")
        yield _form(reached, lambda r: r.per_second / UNITS[cell.unit], ".4g", cell.unit)
        yield _form(reached, lambda r: r.share, ".1%")


def _training_columns(row: Row, cell: Training, trained: Trained | None) -> Iterator[str]:
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


def summarise(rows: Iterable[Row]) -> Iterator[str]:
    """What a reader wants first: what is wrong, the best MFU of each subject, how far off predictions are."""
    rows = list(rows)
    checks = [row for row in rows if isinstance(row.cell, get_args(Check)) and row.status in ("ok", "error", "oom")]
    if checks:
        wrong = [str(row.cell) for row in checks if row.status != "ok"]
        yield f"{len(checks) - len(wrong)} of {len(checks)} checks are right" + (
            f"; not: {'; '.join(wrong)}." if wrong else "."
        )
    best: dict[str, tuple[float, str]] = {}
    for row in rows:
        if isinstance(row.cell, Training) and isinstance(row.measured, Trained) and row.measured.mfu is not None:
            name = f"{row.cell.subject}, sequence {row.cell.seq_len}"
            best[name] = max(best.get(name, (0.0, "")), (row.measured.mfu, row.cell.variant))
    yield from (f"{name}: {mfu:.1%} MFU at best, {variant}." for name, (mfu, variant) in best.items())
    steps = [ratio for row in rows if (ratio := step_ratio(row)) is not None]
    peaks = [ratio for row in rows if (ratio := memory_ratio(row)) is not None]
    if steps:
        yield (
            f"Predictions of {len(steps)} rows are off by {_typical_error(steps):.0%} in step time and "
            f"{_typical_error(peaks):.0%} in memory (median)."
        )


def describe_fit(rows: Iterable[Row], cluster: Cluster) -> Iterator[str]:
    """For each subject, how far predicted step times are off with the constants from before and with these."""
    ratios: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        if isinstance(row.cell, Training) and isinstance(row.measured, Trained) and (before := step_ratio(row)):
            after = predict(row.cell, cluster.gpu).step_time_s / row.measured.step_time_s
            old, new = ratios.setdefault(row.cell.subject, ([], []))
            old.append(before)
            new.append(after)
    yield "Median error of predicted step times with the constants that were there, and with those below, fitted to"
    yield "these very rows:"
    yield ""
    yield "| model | rows | before | after |\n|---|--:|--:|--:|"
    everything: tuple[list[float], list[float]] = (
        [ratio for old, _ in ratios.values() for ratio in old], [ratio for _, new in ratios.values() for ratio in new]
    )  # fmt: skip
    for name, (old, new) in {**ratios, "all": everything}.items():
        if old:
            yield f"| {name} | {len(old)} | {_typical_error(old):.1%} | {_typical_error(new):.1%} |"


def _typical_error(ratios: Iterable[float]) -> float:
    return statistics.median(abs(ratio - 1) for ratio in ratios)


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
