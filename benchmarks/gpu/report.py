"""The report: tables for people, constants of the cost model, and pictures where matplotlib is there.

It is made from the rows alone, so that it can be written again wherever they are.
"""

import re
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.util import find_spec
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks.gpu.calibration import PACKAGES, derive, find_measured
from benchmarks.gpu.cells import Calibration, Ceiling, Cell, Check, HostTime, Saving, Training
from benchmarks.gpu.predict import predict
from benchmarks.gpu.rows import Reached, Row, Status, Trained, find_trained
from benchmarks.gpu.suites import Suite
from benchmarks.pages.markdown import table
from dtlayout.base.files import write_whole
from dtlayout.base.formatting import GIB, join_words
from dtlayout.calibrate.file import to_toml
from dtlayout.spec.cluster import Cluster

DRAW_EVERY_S = 60
"""Pictures are drawn anew so often and at the end: drawing them takes as long as a small cell."""
PICTURES = ("mfu", "predicted-step", "predicted-memory")
"""Endings of the names of pictures, in the order in which they are drawn."""
LEAST_GAIN = 1.01
"""Ratio of step times from which on a saving counts as paid: steps of a quiet GPU differ by less."""
UNITS = {"TFLOP/s": 1e12, "GB/s": 1e9}
TITLES = {
    "checks": "Is it right? Against float64 on the CPU, and bit by bit",
    "savings": "A step with one saving and without it",
    "experts": "Decoder layers of mixtures of experts",
    "memory": "Peaks of memory",
    "blocks": "Decoder layers alone",
    "models": "Whole models",
    "host": "What the host takes of a layer and microbatch",
    "constants": "Constants",
    "ceilings": "What one operation reaches",
    "kernels": "One kernel at a time",
    "sweep": "Micro-batch and recomputation",
}


class Report:
    """FOLDER/bench_gpu-DEVICE.md, its constants and pictures; the page is written again with every row."""

    def __init__(self, folder: Path, device: str, torch: str, suite: Suite, rows: Sequence[Row]):
        self.path = folder / f"bench_gpu-{re.sub('[^a-z0-9]+', '-', device.lower())}"
        """Path of all files of the report, without their endings."""
        self.device = device
        self.torch = torch
        self.suite = suite
        self.rows = list(rows)
        self._constants: list[str] = []
        self._draw_after = 0.0
        self._header = ""

    @property
    def latest(self) -> list[Row]:
        """The last row of each cell."""
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

            mfu, step, memory = (self.path.with_name(f"{self.path.name}-{name}.png") for name in PICTURES)
            draw_mfu(self.suite, self.latest, mfu)
            draw_predictions(self.latest, step, memory)

    def _introduce(self) -> Iterator[str]:
        peak = next((row.peak_flops_per_s for row in self.rows if row.peak_flops_per_s), None)
        yield f"# One GPU: {self.device}"
        yield ""
        yield (
            f"`make bench NAME=gpu`, {datetime.now(timezone.utc):%Y-%m-%d}, torch {self.torch}; bf16 compute, fp32 "
            f"masters and gradients, fused AdamW, a world of one rank."
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
            names = join_words([f"{self.path.name}-{name}.png" for name in PICTURES])
            yield f"Pictures, which `--report` draws: {names}."
        else:
            yield "Pictures: none, since matplotlib is not installed here."

    def _tables(self) -> Iterator[str]:
        """A table for each group; a row stands in all groups that its cell belongs to."""
        rows = {row.cell: row for row in self.latest}
        for name, cells in self.suite.groups.items():
            if found := [rows[cell] for cell in cells if cell in rows]:
                yield from ("", f"## {TITLES[name]}", "", header_of(found[0].cell), *dict.fromkeys(map(show, found)))
        yield from describe_savings(self.suite.savings, rows)
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
    columns = columns_of(cell)
    titles = [*(column.title for column in columns), "result"]
    return f"| {' | '.join(titles)} |\n|{'|'.join('--:' if column.spec else '---' for column in columns)}|---|"


def show(row: Row) -> str:
    """A row of a Markdown table."""
    note = row.note.replace("|", "/")[:160]
    result = f"{row.status}: {note}" if note else row.status
    return f"| {' | '.join([*(column.show(row) for column in columns_of(row.cell)), result])} |"


def columns_of(cell: Cell) -> Sequence["Column"]:
    """The columns left of the result, of the table that a cell's row belongs to."""
    return next(columns for kinds, columns in TABLES if isinstance(cell, kinds))


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    spec: str
    """Format of its numbers; empty for text."""
    part: Literal["row", "cell", "measured", "predicted"]
    """The part of a row that it shows; n/a where the row has none."""
    read: Callable[[Any], Any]
    """Returns the value to show out of that part; None for n/a."""

    def show(self, row: Row) -> str:
        """The text of a row in this column."""
        part = row if self.part == "row" else getattr(row, self.part)
        value = None if part is None else self.read(part)
        return "n/a" if value is None else format(value, self.spec)


def _reach(row: Row) -> str | None:
    unit = row.cell.unit  # type: ignore[union-attr]
    return f"{row.measured.per_second / UNITS[unit]:.4g} {unit}" if isinstance(row.measured, Reached) else None


TABLES: Sequence[tuple[Any, Sequence[Column]]] = (
    (Check, (
        Column("check", "", "cell", str),
        Column("error", ".1e", "measured", attrgetter("error")),
        Column("limit", ".0e", "measured", attrgetter("limit")),
        Column("whose", "", "measured", attrgetter("where")),
        Column("ran", "", "measured", lambda checked: ", ".join(checked.ran) or None),
    )),
    (Ceiling, (
        Column("operation", "", "cell", str),
        Column("time, ms", ".3f", "measured", lambda reached: 1e3 * reached.median_s),
        Column("reached", "s", "row", _reach),
        Column("of the data sheet", ".1%", "measured", attrgetter("share")),
    )),
    (HostTime, (
        Column("what", "", "cell", str),
        Column("ms", ".2f", "measured", lambda host: 1e3 * host.layer_s),
    )),
    (Calibration, (
        Column("what", "", "cell", str),
        Column("matmuls", "d", "measured", lambda found: len(found.matmuls)),
        Column("attention", "d", "measured", lambda found: len(found.attention)),
        Column("steps", "d", "measured", lambda found: len(found.probes)),
    )),
    (Training, (
        Column("model", "", "cell", attrgetter("subject")),
        Column("sequence", "d", "cell", attrgetter("seq_len")),
        Column("micro-batch", "d", "cell", attrgetter("micro_batch")),
        Column("recompute", "", "cell", attrgetter("recompute")),
        Column("kernels", "", "cell", attrgetter("variant")),
        Column("tokens/s", ",.0f", "measured", attrgetter("tokens_per_s")),
        Column("MFU", ".1%", "measured", attrgetter("mfu")),
        Column("step, s", ".3f", "measured", attrgetter("step_time_s")),
        Column("predicted", ".3f", "predicted", attrgetter("step_time_s")),
        Column("ratio", ".2f", "row", lambda row: row.ratios and row.ratios[0]),
        Column("peak, GiB", ".2f", "measured", lambda trained: trained.peak_memory_bytes / GIB),
        Column("predicted", ".2f", "predicted", lambda predicted: predicted.peak_bytes / GIB),
        Column("ratio", ".2f", "row", lambda row: row.ratios and row.ratios[1]),
        Column("attention", "", "measured", lambda trained: ", ".join(trained.attention_kernels) or None),
    )),
)  # fmt: skip
"""Kinds of cells, and the columns that their rows have."""


def summarise(rows: Iterable[Row]) -> Iterator[str]:
    """Lines that a reader wants first: failed checks, the best MFU of each subject, the errors of predictions."""
    rows = list(rows)
    checks = [row for row in rows if isinstance(row.cell, Check) and row.status in ("ok", "error", "oom")]
    if checks:
        wrong = [str(row.cell) for row in checks if row.status != "ok"]
        yield f"{len(checks) - len(wrong)} of {len(checks)} checks are right" + (
            f"; not: {'; '.join(wrong)}." if wrong else "."
        )
    best: dict[str, tuple[float, str]] = {}
    for cell, measured, _ in find_trained(rows):
        if measured.mfu is not None:
            name = f"{cell.subject}, sequence {cell.seq_len}"
            best[name] = max(best.get(name, (0.0, "")), (measured.mfu, cell.variant))
    yield from (f"{name}: {mfu:.1%} MFU at best, {variant}." for name, (mfu, variant) in best.items())
    if ratios := [row.ratios for row in rows if row.ratios]:
        steps, peaks = map(_typical_error, zip(*ratios, strict=True))
        off = f"{steps:.0%} in step time and {peaks:.0%} in memory (median)"
        yield f"Predictions of {len(ratios)} rows are off by {off}."


def describe_savings(savings: Iterable[Saving], rows: Mapping[Cell, Row]) -> Iterator[str]:
    """Section that says which savings paid: measured and predicted time without each of them over that with it."""
    lines = []
    for each in savings:
        pair = [rows.get(cell) for cell in (each.without, each.with_it)]
        if None in pair:
            continue
        without, with_it = (row for row in pair if row)
        both = without.measured, with_it.measured
        measured = predicted = "n/a"
        verdict = next((f"{row.status}: {row.note.replace('|', '/')[:80]}" for row in pair if row and row.note), "")
        if isinstance(both[0], Trained) and isinstance(both[1], Trained):
            gain = both[0].step_time_s / both[1].step_time_s
            measured, verdict = (
                f"{gain:.3f}",
                "paid" if gain > LEAST_GAIN else "cost" if gain * LEAST_GAIN < 1 else "even",
            )
        if without.predicted and with_it.predicted:
            predicted = f"{without.predicted.step_time_s / with_it.predicted.step_time_s:.3f}"
        lines.append([each.item, each.what, measured, predicted, verdict])
    if lines:
        yield from ("", "## Which savings paid", "")
        yield "Step time without a saving over that with it; items are rows of docs/theory/step.md."
        yield ""
        yield from table(["item", "saving", "measured", "predicted", "verdict"], lines)


def describe_fit(rows: Iterable[Row], cluster: Cluster) -> Iterator[str]:
    """For each subject, how far predicted step times are off with the constants from before and with these."""
    ratios = defaultdict[str, list[tuple[float, float]]](list)
    for cell, measured, predicted in find_trained(rows):
        if predicted:
            both_s = predicted.step_time_s, predict(cell, cluster.gpu).step_time_s
            ratios[cell.subject].append((both_s[0] / measured.step_time_s, both_s[1] / measured.step_time_s))
    yield "Median error of predicted step times with the constants that were there, and with those below, fitted to"
    yield "these very rows:"
    yield ""
    groups = {**ratios, "all": list(chain(*ratios.values()))} if ratios else {}
    errors = {name: map(_typical_error, zip(*pairs, strict=True)) for name, pairs in groups.items()}
    lines = [[name, len(groups[name]), *(f"{error:.1%}" for error in both)] for name, both in errors.items()]
    yield from table(["model", "rows", "before", "after"], lines)


def _typical_error(ratios: Iterable[float]) -> float:
    return statistics.median(abs(ratio - 1) for ratio in ratios)


def _write(path: Path, suffix: str, text: str) -> None:
    write_whole(path.with_name(path.name + suffix), text)


def count_by_status(rows: Sequence[Row]) -> str:
    """The last line that is printed."""
    found = Counter(row.status for row in rows)
    return ", ".join(f"{found[status]} {status}" for status in get_args(Status) if found[status])
