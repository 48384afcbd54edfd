"""Files of a run: metrics.jsonl, one object a step; summary.json, one object a run; memory.json, the curve of the first
steps; timeline.json, the timelines of some steps."""

import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from dtlayout.base.checkpoint_names import CHECKPOINTS, list_checkpoints, read_step
from dtlayout.base.errors import EXIT_REFUSED, DtlayoutError
from dtlayout.base.files import parse_json, read_lines, write_whole
from dtlayout.config.sections import TrainConfig
from dtlayout.measure.ledger import Highest
from dtlayout.models.counting import count_model_flops_per_token
from dtlayout.pipelining.timeline import Timeline
from dtlayout.records.run import Run
from dtlayout.spec.batch import Batch
from dtlayout.spec.model_shape import ModelShape

_T = TypeVar("_T")
SUMMARY_NAME = "summary.json"
MEMORY_NAME = "memory.json"
TIMELINE_NAME = "timeline.json"


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One line of metrics.jsonl."""

    step: int
    """Optimizer steps done, this one included."""
    loss: float
    """Nats per valid token of the global batch."""
    grad_norm: float
    """Norm of all gradients before clipping."""
    lr: float
    """Learning rate of this step."""
    tokens: int
    """Tokens seen since the first step of the run."""
    step_time_s: float
    """Seconds from knowing the loss of the step before, or from the end of its checkpoint, to knowing this step's loss.

    So an update counts for the step after it, which it delays, except before a checkpoint and at the end. A run's first
    step begins where its batch is fetched. Writing metrics is part of a step, checkpoints are not.
    """
    tokens_per_s: float
    """Tokens per second of all ranks."""
    tokens_per_s_per_gpu: float
    """Tokens per second of one rank."""
    model_tflops_per_gpu: float
    """Model FLOPs by the study's formula, in 1e12 per second and rank."""
    mfu: float | None
    """Model FLOPs as a share of the peak; None where the peak is not known."""
    peak_memory_bytes: int | None
    """Largest peak of all ranks, bytes; None where this step was not measured."""
    peak_reserved_bytes: int | None = None
    """Most bytes that the allocator of any rank had reserved, which is what runs out; None also on a CPU."""
    validation_loss: float | None = None
    """Nats per token of [validation] after this step; None where it was not measured."""
    data_wait_s: float = 0.0
    """Seconds that rank 0 waited for this step's batch, which a thread reads during the step before."""
    spike: bool = False
    """Whether loss or gradient norm was far above those of recent steps; `[spikes]` says what comes of that."""
    loss_scale: float | None = None
    """Factor of the loss in backward, so that fp16 holds its gradients; None where it is not scaled."""
    layout: str = ""
    """Printed layout of this step; a resumed run may go on in another layout."""
    resumed: bool = False
    """Whether this is the first step of a start that went on from a checkpoint."""
    fullest_expert: float | None = None
    """Tokens of the fullest expert over the mean of its block, in the block where that is highest; None without
    experts, as all of these."""
    fullest_expert_block: int | None = None
    """Number of that block."""
    expert_imbalance: float | None = None
    """Copies of tokens that the fullest of ep's ranks computed over the mean, in the block where that is highest."""
    router_entropy: float | None = None
    """Mean entropy of a token's scores, nats."""
    router_square: float | None = None
    """Mean square of the log-sum-exp of a router's logits, which the z loss keeps small."""
    validation_losses: dict[str, float] | None = None
    """Nats per token of each named set of [validation] after this step; None where none was measured."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Last and best loss of [validation] in a run."""

    last: float
    """Newest loss, nats a token."""
    best: float
    """Smallest loss so far, nats a token."""
    best_step: int
    """Steps that were done at the smallest loss."""

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> "Validation | None":
        """Sum up the lines of metrics.jsonl; None if no step was validated."""
        found = [(line["validation_loss"], line["step"]) for line in lines if line.get("validation_loss") is not None]
        return cls._sum_up(found) if found else None

    @classmethod
    def of_sets(cls, lines: Iterable[Mapping[str, Any]]) -> "dict[str, Validation]":
        """Sum up the lines of metrics.jsonl for each named set."""
        found: dict[str, list[tuple[float, int]]] = {}
        for line in lines:
            for name, loss in (line.get("validation_losses") or {}).items():
                found.setdefault(name, []).append((loss, line["step"]))
        return {name: cls._sum_up(pairs) for name, pairs in found.items()}

    @classmethod
    def _sum_up(cls, found: list[tuple[float, int]]) -> "Validation":
        return cls(last=found[-1][0], best=min(found)[0], best_step=min(found)[1])


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Content of summary.json: how a run ended, and what it reached."""

    outcome: str
    """One of done, stopped, non_finite, refused, crashed and running, which stays if no rank was left to end it."""
    exit_code: int | None = None
    """Exit code of each process of the run; None for a run that crashed, which may go on."""
    steps: int = 0
    """Optimizer steps that the newest state has seen."""
    epochs: float = 0.0
    """Length that `train.epochs` asked for; 0 where `train.steps` did."""
    first_step_s: float | None = None
    """Seconds from the beginning of the last start, when ranks open device and data, until its first loss was known."""
    peak_reserved_bytes: int | None = None
    """Most bytes that the allocator of any rank had reserved; None on a CPU."""
    final_loss: float | None = None
    """Mean loss of the last ten steps, or of all if there are fewer, nats a token."""
    validation: Validation | None = None
    """Losses of [validation]; None for a run without any."""
    validation_sets: dict[str, Validation] = field(default_factory=dict)
    """Losses of each named set of [validation]."""
    parameters: int | None = None
    device: str = ""
    torch: str = ""
    attention_kernels: list[str] = field(default_factory=list)
    """The attention kernels that really ran."""
    kernels: dict[str, list[str]] = field(default_factory=dict)
    """Operation → its kernels that really ran, as far as names tell."""
    chosen: list[str] = field(default_factory=list)
    """A line for each kernel that was left open: what it became, and why."""
    skipped: list[int] = field(default_factory=list)
    """Steps since the last start that updated nothing, since their loss or norm was not finite."""
    spikes: list[int] = field(default_factory=list)
    """Steps since the last start that were spikes."""
    problems: list[str] = field(default_factory=list)
    """Why a run was refused, or has crashed."""
    refused: list[str] = field(default_factory=list)
    """Why the last start was refused, if all else is of an earlier run that had reached something."""
    run: Run | None = None
    """The record that can be reported and compared; None for a run that never began."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON document: all fields, and the main numbers of the record as keys of their own."""
        short, run = (_shorten(self.run), self.run.to_dict()) if self.run else ({}, None)
        validation = vars(self.validation) if self.validation else None
        sets = {name: vars(each) for name, each in self.validation_sets.items()}
        return {**vars(self), "validation": validation, "validation_sets": sets, **short, "run": run}

    def write(self, folder: Path) -> None:
        """Write RUN/summary.json."""
        write_summary(self.to_dict(), folder)


def _shorten(run: Run) -> dict[str, Any]:
    """The main numbers of a record as a few flat keys."""
    scenario, measured, world_size = run.scenario, run.measured, run.layout.world_size
    speed = Speed(scenario.model, scenario.batch, world_size, None)
    names = ("step_time_s", "mfu", "peak_memory_bytes")
    predicted = {name: getattr(run.predicted, name, None) for name in (*names, "calibrated")}
    return {
        "model": scenario.model.name,
        "layout": asdict(run.layout),
        "world_size": world_size,
        **(speed.describe(measured.step_time_s) if measured.step_time_s else {}),
        "step_time_s": measured.step_time_s,
        "mfu": measured.mfu,
        "peak_memory_bytes_by_pp_rank": measured.peak_memory_bytes,
        "expert_imbalance": measured.expert_imbalance,
        "predicted": predicted | {"gpu": scenario.cluster.gpu.name} if run.predicted else None,
        "measured": {name: getattr(measured, name) for name in names},
    }


@dataclass(frozen=True, kw_only=True)
class MemoryCurves:
    """Content of memory.json: the memory of each pipeline rank over the first steps of a run."""

    num_steps: int
    """Number of first steps that the curves show."""
    by_pp_rank: list[list[Highest]]
    """Curve of each pipeline rank's first rank; the actions of one step follow those of the step before."""
    run: Run
    """Record of the run that was measured."""

    def write(self, folder: Path) -> None:
        """Write RUN/memory.json."""
        curves = [[asdict(highest) for highest in curve] for curve in self.by_pp_rank]
        document = {"num_steps": self.num_steps, "by_pp_rank": curves, "run": self.run.to_dict()}
        write_whole(folder / MEMORY_NAME, json.dumps(document) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "MemoryCurves":
        """Read RUN/memory.json; DtlayoutError if it is missing or holds something else."""
        return _read_own(folder / MEMORY_NAME, "--metrics.memory=true", cls._of)

    @classmethod
    def _of(cls, found: Any) -> "MemoryCurves":
        by_pp_rank = found["by_pp_rank"]
        curves = [[Highest(str(part["action"]), int(part["nbytes"])) for part in curve] for curve in by_pp_rank]
        return cls(num_steps=int(found["num_steps"]), by_pp_rank=curves, run=Run.from_dict(found["run"]))


@dataclass(frozen=True, kw_only=True)
class RecordedTimelines:
    """Content of timeline.json: when each pipeline rank's first rank did what, in the last recorded steps."""

    steps: dict[int, Timeline]
    """Step, from 1, → its timeline."""
    run: Run
    """Record of the run that was recorded."""

    def write(self, folder: Path) -> None:
        """Write RUN/timeline.json."""
        steps = [
            {"step": step, "by_pp_rank": timeline.to_rows(), "transfers": timeline.transfers}
            for step, timeline in self.steps.items()
        ]
        write_whole(folder / TIMELINE_NAME, json.dumps({"steps": steps, "run": self.run.to_dict()}) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "RecordedTimelines":
        """Read RUN/timeline.json; DtlayoutError if it is missing or holds something else."""
        return _read_own(folder / TIMELINE_NAME, "--metrics.timeline=true", cls._of)

    @classmethod
    def _of(cls, found: Any) -> "RecordedTimelines":
        steps = {int(each["step"]): Timeline.of_rows(each["by_pp_rank"], each["transfers"]) for each in found["steps"]}
        return cls(steps=steps, run=Run.from_dict(found["run"]))


def _read_own(path: Path, option: str, parse: Callable[[Any], _T]) -> _T:
    """Parse a file that a run writes with `option`; DtlayoutError if it is missing or holds something else."""
    try:
        return parse(parse_json(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise DtlayoutError(f"{path} cannot be read: {error.strerror}; a run writes it with {option}") from None
    except (DtlayoutError, ValueError, KeyError, TypeError) as error:
        raise DtlayoutError(f"{path} is not what a run writes with {option}: {error}") from None


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
        self.unwritten: list[str] = []
        """Lines that the disk had no room for yet."""

    def keep_until(self, step: int) -> int:
        """Drop a torn line and those after `step`, which a resumed run writes again; the last step it had.

        With 0, where a run begins anew, all lines are dropped, that of step 0 too.
        """
        lines = self.read_all()
        if self.path.exists():
            write_whole(self.path, "".join(f"{json.dumps(line)}\n" for line in lines if line["step"] <= step and step))
        return lines[-1]["step"] if lines else 0

    def append(self, metrics: StepMetrics) -> str:
        """Add a line, which is on its way to disk when this returns; a message for people, or an empty text.

        If the disk has no room, the line waits for the next call, and the first such call returns the message.
        """
        return self._append(asdict(metrics))

    def append_start(self, loss: float, named: Mapping[str, float], layout: str) -> str:
        """Add a line for step 0, in which only validation losses are numbers; a message as of `append`."""
        nothing = {each.name: None for each in fields(StepMetrics)}
        losses = {"validation_loss": loss, "validation_losses": dict(named) or None}
        return self._append({**nothing, "step": 0, "tokens": 0, **losses, "spike": False, "layout": layout})

    def _append(self, line: Mapping[str, Any]) -> str:
        self.unwritten.append(json.dumps(line) + "\n")
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(self.unwritten))
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.path, size)  # what there was room for may end within a line
            is_first = len(self.unwritten) == 1
            return f"note: {self.path} cannot be written, its lines wait: {error.strerror}" if is_first else ""
        self.unwritten.clear()
        return ""

    def read(self) -> list[dict[str, Any]]:
        """The lines of steps, but one that a kill tore; none if there is no file yet."""
        return [line for line in self.read_all() if line.get("step") != 0]

    def read_all(self) -> list[dict[str, Any]]:
        """The lines of steps, and before them that of step 0 if validation had one."""
        return [parse_json(line) for line in read_lines(self.path)] if self.path.exists() else []


def write_summary(document: Mapping[str, Any], folder: Path) -> None:
    """Write RUN/summary.json, the fields of `Summary`; OSError if it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / SUMMARY_NAME, json.dumps(document, indent=2) + "\n")


def read_summary(folder: Path) -> dict[str, Any]:
    """The content of RUN/summary.json; empty if it is missing or no JSON object."""
    try:
        summary = parse_json((folder / SUMMARY_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def has_done_all(summary: Mapping[str, Any], train: TrainConfig) -> bool:
    """True if a run folder's summary says that the run has the length that is asked for."""
    if summary.get("outcome") != "done":
        return False
    if train.epochs:
        return bool(summary.get("epochs", 0) >= train.epochs)
    return bool(summary.get("steps", 0) >= train.steps)


def note_crash(folder: Path, line: str, is_refusal: bool) -> None:
    """Note in RUN/summary.json the line that says why all ranks end, and the steps of the newest checkpoint.

    A crashed run may go on. With `is_refusal` a rank refused to go on, so the next start would end the same way.
    Nothing is raised, since the disk may be the reason of the crash.
    """
    with suppress(OSError):
        found = list_checkpoints(folder / CHECKPOINTS)
        outcome, code = ("refused", EXIT_REFUSED) if is_refusal else ("crashed", None)
        reached = {
            "outcome": outcome,
            "exit_code": code,
            "steps": read_step(found[-1]) if found else 0,
            "problems": [line],
        }
        summary = read_summary(folder)
        if summary.get("outcome") == "running":  # and the rank that writes it has not said itself what it refuses
            write_summary({**Summary(outcome=outcome).to_dict(), **summary, **reached}, folder)


def time_steps(times_s: Sequence[float], num_slow: int = 2) -> tuple[float | None, float | None]:
    """Median of step times and the distance between their quartiles, seconds.

    The median of no step and the distance of fewer than two are None. The first `num_slow` steps, which warm up and are
    measured for memory, count only if there are no others.
    """
    counted = times_s[num_slow:] or times_s
    if len(counted) < 2:
        return (counted[0] if counted else None), None
    lower, median, upper = statistics.quantiles(counted, n=4)
    return median, upper - lower
