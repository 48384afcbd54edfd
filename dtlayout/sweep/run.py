"""Run a sweep's trials one after the other, each by a torchrun of its own, and record how each ended.

All results are on disk before the next trial starts, so the same command goes on after any end. If a trial had ended
when its sweep was killed, it is not run again: its run folder has the result.
"""

import fcntl
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dtlayout.base.errors import DtlayoutError
from dtlayout.base.formatting import GIB
from dtlayout.records.run import Outcome, Performance
from dtlayout.sweep import processes
from dtlayout.sweep.halving import halve
from dtlayout.sweep.results import Journal, TrialResult, diagnose, measure
from dtlayout.sweep.spec import Sweep, Trial, make_trial, to_command, to_environment, trial_folder
from dtlayout.training.metrics import read_summary


@dataclass(frozen=True, kw_only=True)
class SweepObserver:
    """Callbacks that hear how a sweep goes, and may stop it."""

    is_stopped: Callable[[], bool] = lambda: False
    """Called all the time; once it returns True, the running trial ends without a result, and the sweep too."""
    on_round: Callable[[Sequence[Trial]], None] = lambda trials: None
    """Called with the trials of each round of successive halving."""
    on_start: Callable[[Trial], None] = lambda trial: None
    on_result: Callable[[TrialResult], None] = lambda result: None


def run_sweep(
    sweep: Sweep,
    trials: Sequence[Trial],
    folder: Path,
    observer: SweepObserver = SweepObserver(),
    *,
    tries_oom: bool = False,
    again: Collection[str] = (),
) -> None:
    """Run each trial that has no result yet; DtlayoutError if another sweep runs in this folder.

    Trials whose outcome is in `again` are tried again, and `tries_oom` also runs trials that are predicted not to fit.
    With `halving`, all trials that are not possible, or predicted not to fit, get their result first. A round's trials
    differ from those of the round before in their steps. So each has a result of its own, and the same call goes on
    where it was.
    """
    if sweep.halving is None:
        _run_each(sweep, trials, folder, observer, again, tries_oom=tries_oom)
        return

    def run_round(left: Sequence[tuple[str, ...]], steps: int) -> dict[tuple[str, ...], float]:
        of_round = replace(sweep, steps=steps)
        chosen = [make_trial(of_round, folder, overrides) for overrides in left]
        observer.on_round(chosen)
        _run_each(of_round, chosen, folder, observer, again, tries_oom=True)
        results = Journal(folder).read()
        ended = {trial.overrides: results[trial.key] for trial in chosen if trial.key in results}
        if len(ended) < len(chosen):  # the sweep was stopped
            return {}
        ran = ((each, r.measured.step_time_s) for each, r in ended.items() if r.outcome == "ok")
        return {each: step_time_s for each, step_time_s in ran if step_time_s}

    candidates = [t for t in trials if t.config is not None and (tries_oom or t.estimate is None or t.estimate.fits)]
    _run_each(sweep, [t for t in trials if t not in candidates], folder, observer, again, tries_oom=False)
    halving = sweep.halving
    if any(trial.estimate is None for trial in candidates):
        halving = replace(halving, first=1.0)  # without predictions all must run first
    if candidates:
        list(halve([trial.overrides for trial in candidates], halving, run_round))


def _run_each(
    sweep: Sweep,
    trials: Sequence[Trial],
    folder: Path,
    observer: SweepObserver,
    again: Collection[str],
    *,
    tries_oom: bool,
) -> None:
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the lock ends with this process
        except OSError:
            raise DtlayoutError(f"another sweep runs in {folder}; wait for it, or use another --folder") from None
        processes.end(str(folder.resolve()), grace_s=sweep.grace_s)  # processes of a sweep that was killed here
        journal = Journal(folder)
        done = {key for key, result in journal.read().items() if result.outcome not in again}
        for trial in trials:
            if trial.key in done:
                continue
            if observer.is_stopped():
                return
            result = _run(sweep, trial, folder, observer, tries_oom=tries_oom)
            if result is None:
                return
            journal.append(result)
            observer.on_result(result)


def _run(sweep: Sweep, trial: Trial, folder: Path, observer: SweepObserver, *, tries_oom: bool) -> TrialResult | None:
    """Run a trial to its end or its time limit, unless it need not be run; None if the sweep is stopped meanwhile."""
    if trial.config is None:
        return _to_result(trial, "refused", "; ".join(trial.problems))
    if trial.estimate is not None and not trial.estimate.fits and not tries_oom:
        peak, capacity = (size / GIB for size in (trial.estimate.peak_bytes, trial.estimate.capacity_bytes))
        return _to_result(trial, "skipped", f"predicted to need {peak:.1f} GiB of {capacity:.1f}")
    observer.on_start(trial)
    place = trial_folder(folder, trial.key)
    run, log, config = place / "run", place / "log.txt", place / "config.toml"
    exit_code, seconds = None, 0.0
    if read_summary(run).get("outcome") != "done":  # else the sweep was killed before it recorded that
        place.mkdir(parents=True, exist_ok=True)
        forced = replace(trial.config, train=replace(trial.config.train, force=True))  # the user decides about memory
        config.write_text(forced.to_toml(), encoding="utf-8")
        (run / "metrics.jsonl").unlink(missing_ok=True)
        (run / "summary.json").unlink(missing_ok=True)
        started = time.monotonic()
        with log.open("wb") as output:
            exit_code = processes.run(
                to_command(sweep, config), output, str(folder.resolve()),
                timeout_s=sweep.timeout_s, grace_s=sweep.grace_s, is_stopped=observer.is_stopped,
                environment=to_environment(sweep),
            )  # fmt: skip
        seconds = time.monotonic() - started
    outcome, cause, tail = diagnose(run, log, exit_code)
    # Whoever stops a sweep may stop its trial too.
    if observer.is_stopped() and outcome in ("hung", "killed", "crashed"):
        return None
    steps, measured = measure(run, sweep.warmup_steps, trial.config.batch)
    return _to_result(trial, outcome, cause, measured, log=tail, steps=steps, seconds=seconds)


def _to_result(
    trial: Trial, outcome: Outcome, cause: str, measured: Performance | None = None, **ended: Any
) -> TrialResult:
    run = trial.run and replace(trial.run, outcome=outcome, measured=measured or trial.run.measured)
    return TrialResult(key=trial.key, setting=trial.setting, overrides=trial.overrides, run=run, cause=cause, **ended)
