"""Run a sweep's trials one after the other, each as a torchrun of its own, and write down how each ended.

Everything that matters is on disk before the next trial starts, so the same command goes on after any end. A trial
that had ended when its sweep was killed is not run again: its run folder tells how it went.
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
    """Who is told how a sweep goes, and may stop it."""

    is_stopped: Callable[[], bool] = lambda: False
    """Asked all the time; once it says so, the trial that runs is ended without a result, and the sweep with it."""
    on_round: Callable[[Sequence[Trial]], None] = lambda trials: None
    """Told the trials of each round of successive halving."""
    on_start: Callable[[Trial], None] = lambda trial: None
    on_result: Callable[[TrialResult], None] = lambda result: None


def run_sweep(
    sweep: Sweep,
    trials: Sequence[Trial],
    folder: Path,
    watch: SweepObserver = SweepObserver(),
    *,
    tries_oom: bool = False,
    again: Collection[str] = (),
) -> None:
    """Run each trial that has no result yet; DtlayoutError if another sweep runs in this folder.

    Ends that are in `again` are tried again, and `tries_oom` also runs what is predicted not to fit. With `halving`,
    what is not possible, or predicted not to fit, is a result first. A round's trials differ from those of the round
    before in their steps, so each is a result of its own, and the same call goes on where it was.
    """
    if sweep.halving is None:
        _run_each(sweep, trials, folder, watch, again, tries_oom=tries_oom)
        return

    def run_round(left: Sequence[tuple[str, ...]], steps: int) -> dict[tuple[str, ...], float]:
        of_round = replace(sweep, steps=steps)
        chosen = [make_trial(of_round, folder, overrides) for overrides in left]
        watch.on_round(chosen)
        _run_each(of_round, chosen, folder, watch, again, tries_oom=True)
        results = Journal(folder).read()
        ended = {trial.overrides: results[trial.key] for trial in chosen if trial.key in results}
        if len(ended) < len(chosen):  # stopped
            return {}
        ran = ((each, r.measured.step_time_s) for each, r in ended.items() if r.outcome == "ok")
        return {each: step_time_s for each, step_time_s in ran if step_time_s}

    candidates = [t for t in trials if t.config is not None and (tries_oom or t.estimate is None or t.estimate.fits)]
    _run_each(sweep, [t for t in trials if t not in candidates], folder, watch, again, tries_oom=False)
    halving = sweep.halving
    if any(trial.estimate is None for trial in candidates):
        halving = replace(halving, first=1.0)  # nothing says which come first
    if candidates:
        list(halve([trial.overrides for trial in candidates], halving, run_round))


def _run_each(
    sweep: Sweep,
    trials: Sequence[Trial],
    folder: Path,
    watch: SweepObserver,
    again: Collection[str],
    *,
    tries_oom: bool,
) -> None:
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system takes it back however this process ends
        except OSError:
            raise DtlayoutError(f"another sweep runs in {folder}; wait for it, or use another --folder") from None
        processes.end(str(folder.resolve()), grace_s=sweep.grace_s)  # of a sweep that was killed here
        journal = Journal(folder)
        done = {key for key, result in journal.read().items() if result.outcome not in again}
        for trial in trials:
            if trial.key in done:
                continue
            if watch.is_stopped():
                return
            result = _run(sweep, trial, folder, watch, tries_oom=tries_oom)
            if result is None:
                return
            journal.append(result)
            watch.on_result(result)


def _run(sweep: Sweep, trial: Trial, folder: Path, watch: SweepObserver, *, tries_oom: bool) -> TrialResult | None:
    """Run a trial, unless it need not be, to its end or its time limit; None if the sweep is stopped meanwhile."""
    if trial.config is None:
        return _to_result(trial, "refused", "; ".join(trial.problems))
    if trial.estimate is not None and not trial.estimate.fits and not tries_oom:
        peak, capacity = (size / GIB for size in (trial.estimate.peak_bytes, trial.estimate.capacity_bytes))
        return _to_result(trial, "skipped", f"predicted to need {peak:.1f} GiB of {capacity:.1f}")
    watch.on_start(trial)
    place = trial_folder(folder, trial.key)
    run, log, config = place / "run", place / "log.txt", place / "config.toml"
    exit_code, seconds = None, 0.0
    if read_summary(run).get("outcome") != "done":  # else the sweep was killed before it wrote that down
        place.mkdir(parents=True, exist_ok=True)
        forced = replace(trial.config, train=replace(trial.config.train, force=True))  # whoever asks for ooms gets them
        config.write_text(forced.to_toml(), encoding="utf-8")
        (run / "metrics.jsonl").unlink(missing_ok=True)
        (run / "summary.json").unlink(missing_ok=True)
        started = time.monotonic()
        with log.open("wb") as output:
            exit_code = processes.run(
                to_command(sweep, config), output, str(folder.resolve()),
                timeout_s=sweep.timeout_s, grace_s=sweep.grace_s, is_stopped=watch.is_stopped,
                environment=to_environment(sweep),
            )  # fmt: skip
        seconds = time.monotonic() - started
    outcome, cause, tail = diagnose(run, log, exit_code)
    if watch.is_stopped() and outcome in ("hung", "killed", "crashed"):  # whoever stops a sweep may stop its trial too
        return None
    steps, measured = measure(run, sweep.warmup_steps, trial.config.batch)
    return _to_result(trial, outcome, cause, measured, log=tail, steps=steps, seconds=seconds)


def _to_result(
    trial: Trial, outcome: Outcome, cause: str, measured: Performance | None = None, **ended: Any
) -> TrialResult:
    run = trial.run and replace(trial.run, outcome=outcome, measured=measured or trial.run.measured)
    return TrialResult(key=trial.key, setting=trial.setting, overrides=trial.overrides, run=run, cause=cause, **ended)
