"""How trials ended: one JSON object a trial in trials.jsonl, from which a sweep goes on and reports are made.

| outcome | |
|---|---|
| ok | all steps were done |
| oom | memory ran out, of a GPU or of the host |
| crashed | a process failed otherwise |
| killed | a process was ended by SIGKILL, which is also what a host that is short of memory does |
| hung | no end within the time limit |
| non_finite | the loss or the gradients became NaN or infinite |
| refused | the layout or a kernel is not possible; nothing was started, or the trainer said so |
| skipped | it is predicted not to fit, and was not tried |
"""

import json
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from dtlayout.errors import DtlayoutError
from dtlayout.training.metrics import MetricsFile, Predicted, read_summary

Outcome = Literal["ok", "oom", "crashed", "killed", "hung", "non_finite", "refused", "skipped"]

_TAIL = 40
"""Lines of a log that are kept."""
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|not enough memory: you tried to allocate|Cannot allocate memory|"
    r"std::bad_alloc|\bMemoryError\b|CUDA_ERROR_OUT_OF_MEMORY|NCCL.*out of memory"
)
_KILLED = re.compile(r"exitcode\s*: -9\b|Signal 9 \(SIGKILL\)")
_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b.*)$")


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """One line of trials.jsonl."""

    key: str
    """Hash of the resolved config and the number of ranks."""
    overrides: list[str]
    """What sets it apart from the sweep's config."""
    layout: dict[str, Any] | None = None
    """Resolved; None where it is not possible."""
    kernels: dict[str, Any] | None = None
    outcome: Outcome
    cause: str = ""
    """Why it is not ok, in a line."""
    log: list[str] = field(default_factory=list)
    """The end of the log, where it is not ok."""
    steps: int = 0
    """Optimizer steps done."""
    step_time_s: float | None = None
    """Median of the steps after those of warming up."""
    step_time_spread_s: float | None = None
    """Between the quartiles of those steps."""
    tokens_per_s_per_gpu: float | None = None
    model_tflops_per_gpu: float | None = None
    mfu: float | None = None
    peak_memory_bytes: list[int] | None = None
    """Of each pipeline rank."""
    predicted: Predicted | None = None
    """Before it was started."""
    seconds: float = 0.0
    """From its start to its end."""


class Journal:
    """trials.jsonl of a sweep's folder."""

    def __init__(self, folder: Path):
        self.path = folder / "trials.jsonl"

    def read(self) -> dict[str, TrialResult]:
        """Key → result of what has ended; a torn line is none. DtlayoutError for what another program wrote."""
        if not self.path.exists():
            return {}
        whole = [line for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1:] == "\n"]
        try:
            return {result.key: result for result in map(_parse, whole)}
        except (ValueError, TypeError, KeyError) as error:
            raise DtlayoutError(f"{self.path} is not what a sweep of this version writes: {error}") from None

    def append(self, result: TrialResult) -> None:
        """Add a line; it is on disk when this returns, and what a kill tore before it is gone."""
        text = self.path.read_bytes() if self.path.exists() else b""
        with self.path.open("r+b" if text else "wb") as file:
            file.seek(text.rfind(b"\n") + 1)
            file.truncate()
            file.write((json.dumps(asdict(result)) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())


def _parse(line: str) -> TrialResult:
    values = json.loads(line)
    predicted = values.pop("predicted")
    return TrialResult(**values, predicted=Predicted(**predicted) if predicted else None)


def diagnose(run: Path, log: Path, exit_code: int | None) -> tuple[Outcome, str, list[str]]:
    """Outcome, cause and the end of the log of a trial that ended with an exit code, or with None in no time."""
    summary = read_summary(run)
    if exit_code == 0 and summary.get("outcome") == "done":
        return "ok", "", []
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    tail = lines[-_TAIL:]
    if exit_code is None:
        return "hung", f"no end within the time limit; {_describe_progress(run)}", tail
    if summary.get("outcome") == "non_finite":
        return "non_finite", _describe_progress(run), tail
    if summary.get("outcome") == "refused":
        return "refused", "; ".join(summary.get("problems", [])), tail
    if found := next((line.strip() for line in lines if _OUT_OF_MEMORY.search(line)), None):
        return "oom", found, tail
    # The first process that fails tells why; what its peers say comes later, and torchrun's own words last.
    error = next((match[1] for line in lines if (match := _ERROR.match(line.strip()))), "")
    if exit_code == -9 or (_KILLED.search("\n".join(lines)) and not _is_own(error)):
        return "killed", f"a process was ended by SIGKILL; {_describe_progress(run)}", tail
    return "crashed", error or f"exit code {exit_code}", tail


def _is_own(error: str) -> bool:
    """Whether an error is a process's own, and not what is said about another's."""
    return bool(error) and not re.search(
        r"Connection (closed|reset)|ChildFailedError|DistBackendError|SignalException", error
    )


def _describe_progress(run: Path) -> str:
    done = len(MetricsFile(run / "metrics.jsonl").read())
    return f"{done} steps were done" if done != 1 else "1 step was done"


def measure(run: Path, warmup_steps: int) -> dict[str, Any]:
    """What a run reached, as fields of TrialResult; steps of warming up count only where there are no others."""
    lines = MetricsFile(run / "metrics.jsonl").read()
    if not lines:
        return {}
    steady = sorted(lines[warmup_steps:] or lines[-1:], key=lambda line: float(line["step_time_s"]))
    middle = steady[len(steady) // 2]
    times = [line["step_time_s"] for line in steady]
    lower, _, upper = statistics.quantiles(times, n=4) if len(times) > 1 else (0.0, 0.0, 0.0)
    return {
        "steps": len(lines),
        "step_time_s": statistics.median(times),
        "step_time_spread_s": upper - lower,
        "tokens_per_s_per_gpu": middle["tokens_per_s_per_gpu"],
        "model_tflops_per_gpu": middle["model_tflops_per_gpu"],
        "mfu": middle["mfu"],
        "peak_memory_bytes": read_summary(run).get("peak_memory_bytes_by_pp_rank"),
    }


def rank(results: Sequence[TrialResult]) -> list[TrialResult]:
    """Those that ran, the fastest first."""
    return sorted((r for r in results if r.step_time_s and r.outcome == "ok"), key=lambda r: r.step_time_s or 0.0)
