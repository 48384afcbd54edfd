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
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from dtlayout.errors import DtlayoutError
from dtlayout.training.metrics import MetricsFile, Predicted, read_summary

Outcome = Literal["ok", "oom", "crashed", "killed", "hung", "non_finite", "refused", "skipped"]

_TAIL = 40
"""Lines of a log that are kept."""
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA (?:error: )?out of memory|failure 2 'out of memory'|CUDA_ERROR_OUT_OF_MEMORY|"
    r"CU(?:BLAS|DNN)_STATUS_(?:INTERNAL_ERROR_)?(?:HOST_)?ALLOC(?:ATION)?_FAILED|NCCL.*out of memory|oom[-_]kill|"
    r"Out Of Memory|not enough memory: you tried to allocate|Cannot allocate memory|std::bad_alloc|\bMemoryError\b"
)
_KILLED = re.compile(r"exitcode\s*: -9\b|Signal 9 \(SIGKILL\)")
_SIGNAL = re.compile(r"Signal \d+ \((SIG(?!TERM|KILL)\w+)\)")
_STALLED = re.compile(r"[Ww]atchdog caught collective operation timeout|Timed out waiting \d+ms for (?:recv|send)")
_OF_ANOTHER = re.compile(
    r"Connection (?:was likely )?(?:closed|reset)|Broken pipe|ChildFailedError|DistBackendError|DistNetworkError|"
    r"SignalException"
)
"""Errors that say what became of another process."""
_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b.*|terminate called .*)$")


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """One line of trials.jsonl."""

    key: str
    """Hash of the resolved config and the number of ranks."""
    setting: str
    """The same but for its number of steps, by which rounds of successive halving differ."""
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
    """Between the quartiles of those steps; None of a single one."""
    tokens_per_s_per_gpu: float | None = None
    model_tflops_per_gpu: float | None = None
    mfu: float | None = None
    peak_memory_bytes: list[int] | None = None
    """Of each pipeline rank."""
    predicted: Predicted | None = None
    """Before it was started."""
    seconds: float = 0.0
    """From its start to its end."""

    @property
    def name(self) -> str:
        """What sets it apart, in short."""
        return name_trial(self.overrides)


def name_trial(overrides: Sequence[str]) -> str:
    """What sets a trial apart, in short.

    >>> name_trial(["--layout.tp=2", "--kernels.norm=eager"])
    'tp=2 norm=eager'
    """
    pairs = (override.partition("=") for override in overrides)
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, _, value in pairs) or "as it is"


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
            raise DtlayoutError(
                f"{self.path} is not what a sweep of this version writes: {error}; use another folder"
            ) from None

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
    """Outcome, cause and the end of the log of a trial that ended with an exit code, or with None in no time.

    Once all steps are done it is ok: threads of gloo may still abort a process that ends.
    """
    summary = read_summary(run)
    if summary.get("outcome") == "done":
        return "ok", "", []
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    outcome, cause = _find_cause(text, exit_code, summary, _describe_progress(run))
    return outcome, cause, text.splitlines()[-_TAIL:]


def _find_cause(text: str, exit_code: int | None, summary: dict[str, Any], progress: str) -> tuple[Outcome, str]:
    """Of an end that was no success. Who runs out of memory may hang after that, or be killed for it."""
    lines = text.splitlines()
    if summary.get("outcome") == "non_finite":
        return "non_finite", progress
    if summary.get("outcome") == "refused":
        return "refused", "; ".join(summary.get("problems", []))
    if found := next((line.strip() for line in lines if _OUT_OF_MEMORY.search(line)), None):
        return "oom", found
    if exit_code is None:
        return "hung", f"no end within the time limit; {progress}"
    if found := next((line.strip() for line in lines if _STALLED.search(line)), None):
        return "hung", found
    # The first process that fails tells why; what its peers say comes later, and torchrun's own words last.
    errors = [match[1] for line in lines if (match := _ERROR.match(line.strip()))]
    own = next((error for error in errors if not _OF_ANOTHER.search(error)), None)
    if own is None and (exit_code in (-9, 137) or _KILLED.search(text)):
        return "killed", f"a process was ended by SIGKILL; {progress}"
    if own is None and (ended := _SIGNAL.search(text)):
        return "crashed", f"a process was ended by {ended[1]}; {progress}"
    return "crashed", own or f"exit code {exit_code}; {progress}"


def _describe_progress(run: Path) -> str:
    done = len(MetricsFile(run / "metrics.jsonl").read())
    return f"{done} steps were done" if done != 1 else "1 step was done"


def measure(run: Path, warmup_steps: int) -> dict[str, Any]:
    """What a run reached, as fields of TrialResult; steps that warm up or watch memory count if there are no others."""
    lines = MetricsFile(run / "metrics.jsonl").read()
    if not lines:
        return {}
    counted = [line for line in lines[warmup_steps:] if line["peak_memory_bytes"] is None]  # watching memory takes time
    times = [line["step_time_s"] for line in counted or lines[warmup_steps:] or lines[-1:]]
    lower, median, upper = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0], times[0], times[0])
    last = lines[-1]  # all else of it is proportional to its time

    def scale(name: str) -> float | None:
        return None if last[name] is None else last[name] * last["step_time_s"] / median

    return {
        "steps": len(lines),
        "step_time_s": median,
        "step_time_spread_s": upper - lower if len(times) > 1 else None,
        "tokens_per_s_per_gpu": scale("tokens_per_s_per_gpu"),
        "model_tflops_per_gpu": scale("model_tflops_per_gpu"),
        "mfu": scale("mfu"),
        "peak_memory_bytes": read_summary(run).get("peak_memory_bytes_by_pp_rank"),
    }


def keep_longest(results: Collection[TrialResult]) -> list[TrialResult]:
    """One result of each setting: of several rounds of successive halving the longest that ended well, if one did."""
    longest = {r.setting: r for r in sorted(results, key=lambda r: (r.outcome == "ok", r.steps))}
    return [r for r in results if longest[r.setting] is r]


def rank(results: Sequence[TrialResult]) -> list[TrialResult]:
    """Those that ran, the fastest first."""
    return sorted((r for r in results if r.step_time_s and r.outcome == "ok"), key=lambda r: r.step_time_s or 0.0)
