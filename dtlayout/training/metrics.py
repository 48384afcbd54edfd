"""What a run writes down: metrics.jsonl, one object a step; summary.json, one a run; memory.json, the first steps'."""

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dtlayout.batch import Batch
from dtlayout.errors import DtlayoutError
from dtlayout.files import write_whole
from dtlayout.measure.curve import Highest
from dtlayout.model_shape import ModelShape
from dtlayout.models.counting import count_model_flops_per_token

SUMMARY_NAME = "summary.json"
MEMORY_NAME = "memory.json"


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One line of metrics.jsonl."""

    step: int
    """Optimizer steps done, this one included."""
    loss: float
    """Nats per valid token of the global batch."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """Learning rate of this step."""
    tokens: int
    """Tokens seen since the first step of the run."""
    step_time_s: float
    """From fetching the batch to knowing the loss; writing metrics and checkpoints is not in it."""
    tokens_per_s: float
    """Over all ranks."""
    tokens_per_s_per_gpu: float
    """Tokens per second of one rank."""
    model_tflops_per_gpu: float
    """Model FLOPs by the study's formula, in 1e12 per second and rank."""
    mfu: float | None
    """Those as a share of the peak; None where the peak is not known."""
    peak_memory_bytes: int | None
    """Largest of all ranks; None where this step was not measured."""


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What a run is predicted to reach, or reached; the same keys for both."""

    step_time_s: float | None
    """Seconds of a step; measured, the median as in Summary."""
    mfu: float | None
    """By the study's convention; None where the peak is not known."""
    peak_memory_bytes: list[int] | None
    """Of each pipeline rank."""


@dataclass(frozen=True, kw_only=True)
class Predicted(Reached):
    """A prediction, and what it rests on."""

    gpu: str
    """The GPU type that it is for."""
    calibrated: bool
    """Whether runs of this trainer on that type stand behind it."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """summary.json: how a run ended and what it reached."""

    outcome: str
    """done, stopped, non_finite, refused, or running: until it ends, and for ever if it crashes."""
    exit_code: int | None = None
    """What each process of the run returns."""
    steps: int = 0
    """Optimizer steps that the newest state has seen."""
    final_loss: float | None = None
    """Mean of the last ten steps, nats a token."""
    model: str = ""
    parameters: int | None = None
    layout: dict[str, Any] | None = None
    world_size: int | None = None
    device: str = ""
    torch: str = ""
    attention_kernels: list[str] = field(default_factory=list)
    """The attention kernels that really ran."""
    kernels: dict[str, list[str]] = field(default_factory=dict)
    """The same of each operation, as far as names tell."""
    step_time_s: float | None = None
    """Median of this process's steps, the first two left out."""
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    model_tflops_per_gpu: float | None = None
    mfu: float | None = None
    """None where the peak is not known."""
    peak_memory_bytes_by_pp_rank: list[int] | None = None
    """Largest over the other axes; None if no step was measured."""
    predicted: Predicted | None = None
    """Before the first step; None where the GPU type is not known."""
    measured: Reached | None = None
    """The same of the run as it was."""
    problems: list[str] = field(default_factory=list)
    """Why a run was refused."""

    def write(self, folder: Path) -> None:
        """Write RUN/summary.json."""
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / SUMMARY_NAME, json.dumps(asdict(self), indent=2) + "\n")


@dataclass(frozen=True, kw_only=True)
class MemoryCurves:
    """memory.json: what the first rank of each stage held in the first steps of a run."""

    num_steps: int
    """How many, from the first."""
    by_pp_rank: list[list[Highest]]
    """Of each pipeline rank, the actions of one step after those of the other."""
    run: dict[str, Any]
    """What ran, as `prediction.describe_run` says it."""

    def write(self, folder: Path) -> None:
        """Write RUN/memory.json."""
        write_whole(folder / MEMORY_NAME, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "MemoryCurves":
        """Read RUN/memory.json; DtlayoutError if there is none, or none of ours."""
        path = folder / MEMORY_NAME
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            curves = [
                [Highest(str(part["action"]), int(part["nbytes"])) for part in curve] for curve in found["by_pp_rank"]
            ]
            return cls(num_steps=int(found["num_steps"]), by_pp_rank=curves, run=dict(found["run"]))
        except OSError as error:
            raise DtlayoutError(
                f"{path} cannot be read: {error.strerror}; a run writes it with --metrics.memory=true"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise DtlayoutError(f"{path} is not what a run writes with --metrics.memory=true") from None


@dataclass(frozen=True)
class Speed:
    """Turns step times into throughput."""

    model: ModelShape
    batch: Batch
    world_size: int
    peak_flops_per_s: float | None

    def describe(self, step_time_s: float) -> dict[str, float | None]:
        """The throughput fields of StepMetrics."""
        tokens_per_s = self.batch.num_tokens / step_time_s
        flops_per_s = tokens_per_s * count_model_flops_per_token(self.model, self.batch.seq_len) / self.world_size
        return {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_gpu": tokens_per_s / self.world_size,
            "model_tflops_per_gpu": flops_per_s / 1e12,
            "mfu": flops_per_s / self.peak_flops_per_s if self.peak_flops_per_s else None,
        }


class MetricsFile:
    """metrics.jsonl of a run folder."""

    def __init__(self, path: Path):
        self.path = path

    def keep_until(self, step: int) -> None:
        """Drop the lines after `step`, and a torn last one: a resumed run writes them again."""
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        write_whole(self.path, "".join(kept))

    def append(self, metrics: StepMetrics) -> None:
        """Add a line; it is on its way to disk when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(metrics)) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All lines, but for one that a kill tore; none if there is no file yet."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]


def read_summary(folder: Path) -> dict[str, Any]:
    """How the last run in a folder ended; empty if nobody knows."""
    try:
        summary = json.loads((folder / SUMMARY_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def median_step_time(times_s: list[float], num_slow: int = 2) -> float | None:
    """Median without the first steps, which warm up and are measured for memory; None without any step."""
    return statistics.median(times_s[num_slow:] or times_s) if times_s else None
