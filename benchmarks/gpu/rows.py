"""What came of a cell."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchmarks.gpu.cells import Cell

Status = Literal["ok", "oom", "error", "not run"]


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What a ceiling cell measured."""

    median_s: float
    """Of one operation."""
    per_second: float
    """FLOPs or bytes."""
    share: float | None
    """Of the data sheet's number; None where that is not known."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training cell measured."""

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
    """Those that really ran."""
    loss: float | None
    """After the last step; blocks alone have none."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the cost model said of a training cell, by the constants of this trainer on the GPU type."""

    step_time_s: float
    peak_bytes: float
    capacity_bytes: float
    """What the allocator may hold."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A cell and what came of it."""

    cell: Cell
    status: Status = "ok"
    note: str = ""
    """Why it is not ok: first line of the failure."""
    device: str | None = None
    peak_flops_per_s: float | None = None
    """The 100 % of MFU."""
    measured: Reached | Trained | None = None
    """None if it is not ok."""
    predicted: Prediction | None = None
    """Of a training cell, whether it ran or not."""
    not_predicted: str = ""
    """Why it has no prediction."""

    def flatten(self) -> dict[str, Any]:
        """As the report's JSON holds it."""
        return {"kind": type(self.cell).__name__, "name": str(self.cell), **asdict(self)}
