"""Results of trials: one JSON object a trial in trials.jsonl, from which a sweep goes on and reports are made.

Each holds the trial's `Run`, so that this file alone is enough for a report. `Run` explains the outcomes.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtlayout.base.errors import DtlayoutError
from dtlayout.base.files import append_line, parse_json, read_lines
from dtlayout.base.formatting import plural
from dtlayout.records.run import Outcome, Performance, Run
from dtlayout.spec.batch import Batch
from dtlayout.training.metrics import MetricsFile, read_summary, time_steps

FAILURES: tuple[Outcome, ...] = ("oom", "crashed", "killed", "hung", "non_finite", "refused", "skipped")
"""Outcomes of trials other than ok."""
_TAIL = 40
"""Last lines of a log that are kept."""
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA (?:error: )?out of memory|failure 2 'out of memory'|CUDA_ERROR_OUT_OF_MEMORY|"
    r"CU[A-Z]+_STATUS_(?:INTERNAL_ERROR_)?(?:HOST_)?ALLOC(?:ATION)?_FAILED|NCCL.*out of memory|oom[-_]kill|"
    r"Out Of Memory|not enough memory: you tried to allocate|Cannot allocate memory|std::bad_alloc|\bMemoryError\b"
)
_KILLED = re.compile(r"exitcode\s*: -9\b|Signal 9 \(SIGKILL\)")
_SIGNAL = re.compile(r"Signal \d+ \((SIG(?!TERM|KILL)\w+)\)")
_STALLED = re.compile(r"[Ww]atchdog caught collective operation timeout|Timed out waiting \d+ms for (?:recv|send)")
_OF_ANOTHER = re.compile(
    r"Connection (?:was likely )?(?:closed|reset)|Broken pipe|ChildFailedError|DistBackendError|DistNetworkError|"
    r"SignalException"
)
"""Errors that only report the end of another process."""
_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b.*|terminate called .*)$")


@dataclass(frozen=True, kw_only=True)
class AnyTrial:
    """A trial, before or after it has run."""

    key: str
    """Hash of the resolved config and the number of ranks."""
    setting: str
    """Hash of the same without the number of steps, in which rounds of successive halving differ."""
    overrides: tuple[str, ...]
    """Overrides that tell it from the sweep's config."""
    run: Run | None = None
    """Run of the trial, predicted where the GPU type is known, measured once it ran; None if it is not possible."""

    @property
    def name(self) -> str:
        """Short form of the overrides.

        >>> AnyTrial(key="", setting="", overrides=("--layout.tp=2", "--kernels.norm=eager")).name
        'tp=2 norm=eager'
        """
        pairs = (override.partition("=") for override in self.overrides)
        return " ".join(f"{key.rpartition('.')[2]}={value}" for key, _, value in pairs) or "as it is"


@dataclass(frozen=True, kw_only=True)
class TrialResult(AnyTrial):
    """The end of one trial: a line of trials.jsonl."""

    cause: str = ""
    """Reason in a line; empty if the trial is ok."""
    log: list[str] = field(default_factory=list)
    """Last lines of the log; empty if the trial is ok."""
    steps: int = 0
    """Optimizer steps done."""
    seconds: float = 0.0
    """Seconds from the trial's start to its end."""

    @property
    def outcome(self) -> Outcome:
        """How the trial ended."""
        return self.run.outcome if self.run else "refused"

    @property
    def measured(self) -> Performance:
        """Performance of the steps after warming up."""
        return self.run.measured if self.run else Performance()

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of trials.jsonl."""
        return {**vars(self), "outcome": self.outcome, "run": self.run and self.run.to_dict()}


class Journal:
    """trials.jsonl of a sweep's folder."""

    def __init__(self, folder: Path):
        self.path = folder / "trials.jsonl"

    def read(self) -> dict[str, TrialResult]:
        """Key → result of each trial that has ended (`read_results`); empty if there is no file yet."""
        return read_results(self.path) if self.path.exists() else {}

    def append(self, result: TrialResult) -> None:
        """Add a line, as `append_line` does."""
        append_line(self.path, json.dumps(result.to_dict()))


def read_results(path: Path) -> dict[str, TrialResult]:
    """Key → result of each trial that has ended, without unfinished lines.

    DtlayoutError for a file that this version does not write.
    """
    try:
        return {result.key: result for result in map(_parse, read_lines(path))}
    except OSError as error:
        raise DtlayoutError(f"{path} cannot be read: {error.strerror}") from None
    except (DtlayoutError, ValueError, TypeError, KeyError) as error:
        what = f"no {error.args[0]!r} in a line" if isinstance(error, KeyError) else str(error)
        raise DtlayoutError(f"{path} is not what a sweep of this version writes: {what}; use another folder") from None


def _parse(line: str) -> TrialResult:
    values = parse_json(line)
    run, _ = values.pop("run"), values.pop("outcome")  # the run has it too
    values["run"] = run and Run.from_dict(run)
    return TrialResult(**values | {"overrides": tuple(values["overrides"])})


def diagnose(run: Path, log: Path, exit_code: int | None) -> tuple[Outcome, str, list[str]]:
    """Outcome, cause and last lines of the log of a trial with this exit code; None means that its time was over.

    Once all steps are done it is ok: threads of gloo may still abort a process that ends.
    """
    summary = read_summary(run)
    if summary.get("outcome") == "done":
        return "ok", "", []
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    done = len(MetricsFile(run / "metrics.jsonl").read())
    progress = f"{plural(done, 'step')} {'was' if done == 1 else 'were'} done"
    return *_find_cause(text, exit_code, summary, progress), text.splitlines()[-_TAIL:]


def _find_cause(text: str, exit_code: int | None, summary: dict[str, Any], progress: str) -> tuple[Outcome, str]:
    """Outcome and cause of a failed trial. A process that runs out of memory may hang after that, or be killed."""
    lines = text.splitlines()
    if summary.get("outcome") == "non_finite":
        return "non_finite", progress
    if summary.get("outcome") == "refused":
        return "refused", "; ".join(summary.get("problems", []))
    if found := next(filter(tells_out_of_memory, lines), None):
        return "oom", found.strip()
    if exit_code is None:
        return "hung", f"no end within the time limit; {progress}"
    if found := next(filter(_STALLED.search, lines), None):
        return "hung", found.strip()
    # The first process that fails tells the cause; its peers' errors come later, and torchrun's own last.
    errors = [match[1] for line in lines if (match := _ERROR.match(line.strip()))]
    own = next((error for error in errors if not _OF_ANOTHER.search(error)), None)
    if own is None and (exit_code in (-9, 137) or _KILLED.search(text)):
        return "killed", f"a process was ended by SIGKILL; {progress}"
    if own is None and (ended := _SIGNAL.search(text)):
        return "crashed", f"a process was ended by {ended[1]}; {progress}"
    return "crashed", own or f"exit code {exit_code}; {progress}"


def tells_out_of_memory(text: str) -> bool:
    """Whether a line of a log, or an error as text, says that memory was too small."""
    return _OUT_OF_MEMORY.search(text) is not None


def measure(run: Path, warmup_steps: int, batch: Batch) -> tuple[int, Performance]:
    """Number of steps and performance of a run; steps that warm up or track memory count if there is no other."""
    lines = MetricsFile(run / "metrics.jsonl").read()
    if not lines:
        return 0, Performance()
    counted = [line for line in lines[warmup_steps:] if line["peak_memory_bytes"] is None]  # tracking memory takes time
    counted = counted or lines[warmup_steps:] or lines[-1:]
    step_time_s, spread_s = time_steps([line["step_time_s"] for line in counted], 0)
    assert step_time_s is not None, "there are lines"
    last = lines[-1]  # its MFU is proportional to its speed
    summary = read_summary(run)
    peaks = summary.get("peak_memory_bytes_by_pp_rank")
    return len(lines), Performance(
        step_time_s=step_time_s, step_time_spread_s=spread_s, tokens_per_s=batch.num_tokens / step_time_s,
        mfu=None if last["mfu"] is None else last["mfu"] * last["step_time_s"] / step_time_s,
        peak_memory_bytes=peaks and tuple(peaks), peak_reserved_bytes=summary.get("peak_reserved_bytes"),
        expert_imbalance=summary.get("expert_imbalance"),
    )  # fmt: skip


def keep_longest(results: Collection[TrialResult]) -> list[TrialResult]:
    """One result of each setting: of several rounds of successive halving the longest that is ok, if any is."""
    longest = {r.setting: r for r in sorted(results, key=lambda r: (r.outcome == "ok", r.steps))}
    return [r for r in results if longest[r.setting] is r]


def sort_by_time(results: Sequence[TrialResult]) -> list[TrialResult]:
    """The trials that ran, the fastest first."""
    ran = [result for result in results if result.outcome == "ok" and result.measured.step_time_s]
    return sorted(ran, key=lambda result: result.measured.step_time_s or 0.0)
