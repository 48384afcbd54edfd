"""Rows: the result of each cell, and the file in which one call leaves them for the next."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks.gpu.cells import Calibration, Ceiling, Cell, Check, HostTime, Training
from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import append_line, read_lines, write_whole
from dtlayout.calibrate.measured import Measured

Status = Literal["ok", "oom", "error", "not run"]


@dataclass(frozen=True, kw_only=True)
class Checked:
    """How far a check's results are from what they should be."""

    error: float
    """The largest ‖a - b‖ / ‖b‖; infinite where something is not finite."""
    where: str
    """Name of the result that has this error."""
    limit: float
    """The largest that is right."""
    ran: tuple[str, ...] = ()
    """Operations and their kernels that really ran, where they were looked at."""
    problem: str = ""
    """Sentence on anything else that is wrong; empty if nothing is."""

    @property
    def wrong(self) -> str:
        """All problems in a line; empty if the results are right."""
        size = f"{self.where} is off by {self.error:.2g}, more than {self.limit:g}" if self.error > self.limit else ""
        return "; ".join(filter(None, (size, self.problem)))


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """Seconds that the host takes."""

    layer_s: float
    """Seconds for one layer and microbatch, forward and backward."""


@dataclass(frozen=True, kw_only=True)
class Reached:
    """The measurement of a ceiling cell."""

    median_s: float
    """Median of the seconds that one operation takes."""
    per_second: float
    """FLOPs or bytes."""
    share: float | None
    """Fraction of the data sheet's number that is reached; None where that number is not known."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The measurement of a training cell."""

    first_step_s: float
    """With compilation and first allocations, and without the profiler that the next step runs under."""
    step_time_s: float
    """Median of the timed steps."""
    slowest_step_s: float
    tokens_per_s: float
    model_tflops_per_gpu: float
    mfu: float | None
    """None where the GPU's peak is not known."""
    peak_memory_bytes: int
    """torch.cuda.max_memory_allocated of the timed steps; on CPU what StorageTracker counts in one more."""
    attention_kernels: tuple[str, ...]
    """Names of the attention kernels that really ran."""
    loss: float | None
    """After the last step; blocks alone have none."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The cost model's prediction for a training cell, by the constants of this trainer on the GPU type."""

    step_time_s: float
    peak_bytes: float
    capacity_bytes: float
    """Most bytes that the allocator may hold."""


Measurement = Checked | Reached | Trained | HostTimes | Measured
_MEASUREMENTS: list[tuple[Any, type[Measurement]]] = [
    (Check, Checked), (Ceiling, Reached), (Training, Trained), (HostTime, HostTimes), (Calibration, Measured)
]  # fmt: skip
"""Kinds of cells, and what is measured of them."""
_KINDS: dict[str, tuple[type[Cell], type[Measurement]]] = {
    cell.__name__: (cell, measured) for cells, measured in _MEASUREMENTS for cell in get_args(cells) or (cells,)
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A cell and what came of it."""

    cell: Cell
    status: Status = "ok"
    note: str = ""
    """Why it is not ok: first line of the failure."""
    device: str | None = None
    torch: str = ""
    """Version of torch."""
    peak_flops_per_s: float | None = None
    """The 100 % of MFU."""
    measured: Measurement | None = None
    """None if it is not ok."""
    predicted: Prediction | None = None
    """Prediction for a training cell, whether it ran or not; None for other cells."""
    not_predicted: str = ""
    """Why it has no prediction."""

    @property
    def ratios(self) -> tuple[float, float] | None:
        """Predicted over measured step time and peak memory of a training; None where it has not both."""
        if self.predicted is None or not isinstance(self.measured, Trained):
            return None
        memory_ratio = self.predicted.peak_bytes / self.measured.peak_memory_bytes
        return self.predicted.step_time_s / self.measured.step_time_s, memory_ratio

    def flatten(self) -> dict[str, Any]:
        """The row as a table of JSON."""
        return {"kind": type(self.cell).__name__, "name": str(self.cell), **asdict(self)}

    @staticmethod
    def parse(table: dict[str, Any]) -> "Row":
        """The row of a table that `flatten` gave; InvalidConfig, KeyError or TypeError if it is another table."""
        cell, measured = _KINDS[table["kind"]]
        values = {name: value for name, value in table.items() if name not in ("kind", "name")}
        for name, kind in (("cell", cell), ("measured", measured), ("predicted", Prediction)):
            if values[name] is not None:
                values[name] = toml.parse(values[name], kind)
        return Row(**values)


def find_trained(rows: Iterable[Row]) -> Iterator[tuple[Training, Trained, Prediction | None]]:
    """Cell, measurement and prediction of each training that ran."""
    for row in rows:
        if isinstance(row.cell, Training) and isinstance(row.measured, Trained):
            yield row.cell, row.measured, row.predicted


class RowsFile:
    """Rows, one a line, each on the disk before the next cell runs; a kill loses none but the one that it cuts."""

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> list[Row]:
        """All rows that can be read; what an earlier version wrote in another form is left out."""
        rows = []
        for line in read_lines(self.path):
            try:
                rows.append(Row.parse(json.loads(line)))
            except (ValueError, KeyError, TypeError, InvalidConfig):  # of another version
                continue
        return rows

    def write(self, rows: Iterable[Row]) -> None:
        """Replace all rows."""
        write_whole(self.path, "".join(f"{_to_line(row)}\n" for row in rows))

    def append(self, row: Row) -> None:
        """Add a row."""
        append_line(self.path, _to_line(row))


def _to_line(row: Row) -> str:
    return json.dumps(row.flatten())
