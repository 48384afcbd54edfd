"""dtlayout sweep: run many configs for real, and keep how each of them ended."""

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dtlayout.base.errors import EXIT_STOPPED, DtlayoutError, InvalidConfig
from dtlayout.base.formatting import align, plural
from dtlayout.base.signals import note_signals
from dtlayout.base.terminal import open_console
from dtlayout.commands.arguments import JsonDocument, show
from dtlayout.costmodel.scenario import NO_TIME
from dtlayout.sweep.results import FAILURES, Journal, TrialResult, keep_longest, sort_by_time
from dtlayout.sweep.run import SweepObserver, run_sweep
from dtlayout.sweep.spec import Sweep, Trial, make_trials, read_sweep

EXAMPLE = "dtlayout sweep configs/sweeps/debug-4cpu.toml --list"
_BEST_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sweep's file, its folder, and which trials to run again."""
    parser.add_argument("sweep", type=Path, metavar="SWEEP.toml", help="what to try")
    parser.add_argument("--folder", type=Path, metavar="F", help="where results go; sweeps/NAME by default")
    parser.add_argument("--list", action="store_true", help="show what would be run, and why the rest would not")
    parser.add_argument(
        "--retry", default="", metavar="OUTCOME,…", help="run again what ended so, such as crashed,killed,hung"
    )
    parser.add_argument("--try-oom", action="store_true", help="run also what is predicted not to fit")


def run(options: argparse.Namespace) -> int:
    """Run all trials that have no result yet, or list them."""
    sweep = read_sweep(options.sweep)
    folder = options.folder or Path("sweeps") / options.sweep.stem
    retries = [text.strip() for text in options.retry.split(",") if text.strip()]
    if unknown := [text for text in retries if text not in FAILURES]:
        raise InvalidConfig(f"--retry={','.join(unknown)} cannot be tried again; use {', '.join(FAILURES)}")
    trials = make_trials(sweep, folder)
    if options.list:
        return show(options, [_to_document(trial) for trial in trials], lambda _: _list(sweep, trials, folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DtlayoutError(f"--folder={folder} cannot be made a folder: {error.strerror}") from None
    console = open_console(stderr=True, highlight=False)
    with note_signals() as stop:
        again = {*retries, *(["skipped"] if options.try_oom else [])}
        known = {k: r for k, r in Journal(folder).read().items() if r.outcome not in again}
        board = _Board(console, trials, known)
        with Live(get_renderable=board.draw, console=console, refresh_per_second=2, transient=True):
            watch = SweepObserver(
                is_stopped=lambda: stop.is_made,
                on_round=board.note_round, on_start=board.note_start, on_result=board.note,
            )  # fmt: skip
            run_sweep(sweep, trials, folder, watch, tries_oom=options.try_oom, again=again)
    trials = board.trials  # of a halved sweep, those of its last round
    found = [board.results[trial.key] for trial in trials if trial.key in board.results]
    document: dict[str, Any] = {"ok": True, "folder": str(folder), "trials": [result.to_dict() for result in found]}
    document |= {"_results": found, "_num_trials": len(trials), "_is_stopped": stop.is_made}
    done = show(options, document, _summarize)
    return EXIT_STOPPED if stop.is_made else done


class _Board:
    """The display while trials run: how many are left, how long that takes, and the best so far."""

    def __init__(self, console: Console, trials: Sequence[Trial], results: dict[str, TrialResult]):
        self.console, self.trials, self.results = console, list(trials), dict(results)
        self.running: tuple[Trial, float] | None = None

    def note_round(self, trials: Sequence[Trial]) -> None:
        """A round of successive halving begins: only its trials count from here on."""
        self.trials = list(trials)
        steps = trials[0].config.train.steps if trials and trials[0].config else 0
        self._say(f"round of {plural(len(trials), 'trial')}, {plural(steps, 'step')} each")

    def note_start(self, trial: Trial) -> None:
        self.running = trial, time.monotonic()
        self._say(f"{self._count()} {trial.name}")

    def note(self, result: TrialResult) -> None:
        self.results[result.key] = result
        if self.running is not None and self.running[0].key == result.key:
            self._say(f"    {_describe(result)}")
        self.running = None

    def draw(self) -> Text:
        """The display below the lines: counts, the trial that runs, and the fastest so far."""
        results = [self.results[trial.key] for trial in self.trials if trial.key in self.results]
        lines = [f"{self._count()}  {_count_outcomes(results)}  {self._describe_rest()}"]
        if self.running is not None:
            lines.append(f"running for {time.monotonic() - self.running[1]:.0f} s: {self.running[0].name}")
        return Text("\n".join([*lines, *_tabulate(results)]), no_wrap=True)

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def _count(self) -> str:
        done = sum(trial.key in self.results for trial in self.trials)
        return f"[{done}/{len(self.trials)}]"

    def _describe_rest(self) -> str:
        """How long the remaining trials take, in words, at the mean pace of those that ran; empty if none ran or none
        is left.
        """
        keys = {trial.key for trial in self.trials}
        paces = [result.seconds for key, result in self.results.items() if result.seconds and key in keys]
        left = sum(t.key not in self.results and t.config is not None for t in self.trials)
        if not paces or not left:
            return ""
        minutes = left * sum(paces) / len(paces) / 60
        return f"about {minutes:.0f} min left" if minutes >= 1 else "less than a minute left"


def _describe(result: TrialResult) -> str:
    run, measured = result.run, result.measured
    if run is None or run.outcome != "ok" or measured.step_time_s is None:
        return f"{result.outcome}: {result.cause}"
    text = f"{measured.step_time_s:.3f} s a step"
    if run.predicted and run.predicted.step_time_s:
        text += f", predicted {run.predicted.step_time_s:.3f} s"
    text += f", {run.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
    return text if measured.mfu is None else f"{text}, MFU {measured.mfu:.1%}"


def _count_outcomes(results: Sequence[TrialResult]) -> str:
    counts = Counter(result.outcome for result in results)
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())


def _tabulate(results: Sequence[TrialResult]) -> list[str]:
    """A table of the fastest."""
    rows = [["fastest so far", "s a step", "spread", "tokens/s/GPU", "MFU", "peak MiB"]]
    for result in sort_by_time(results)[:_BEST_SHOWN]:
        assert result.run is not None, "what ran was possible"
        run, measured = result.run, result.measured
        peaks = [peak for peak in measured.peak_memory_bytes or () if peak is not None]
        rows.append([
            result.name, f"{measured.step_time_s:.3f}",
            "n/a" if measured.step_time_spread_s is None else f"{measured.step_time_spread_s:.3f}",
            f"{run.tokens_per_s_per_gpu:,.0f}", "n/a" if measured.mfu is None else f"{measured.mfu:.1%}",
            f"{max(peaks) / 2**20:,.0f}" if peaks else "n/a",
        ])  # fmt: skip
    return ["", *align(rows)] if len(rows) > 1 else []


def _summarize(document: JsonDocument) -> Iterator[str]:
    results = document["_results"]
    yield f"{len(results)} of {plural(document['_num_trials'], 'trial')}: {_count_outcomes(results)}"
    yield from dict.fromkeys(f"refused: {result.cause}" for result in results if result.outcome == "refused")
    yield from _tabulate(results)
    if results:
        yield f"{document['folder']}/trials.jsonl"
    if document["_is_stopped"]:
        yield "stopped; the same command goes on"


def _list(sweep: Sweep, trials: Sequence[Trial], folder: Path) -> Iterator[str]:
    """A line for each trial: its end (in the longest round of a halved sweep), or its prediction."""
    ended = Journal(folder).read()
    if sweep.halving:  # whose rounds have keys of their own
        longest = {result.setting: result for result in keep_longest(ended.values())}
        ended = {trial.key: longest[trial.setting] for trial in trials if trial.setting in longest}
    for trial in trials:
        if trial.config is None:
            yield f"impossible  {trial.name}: {'; '.join(trial.problems)}"
        elif trial.key in ended:
            yield f"done        {trial.name}: {_describe(ended[trial.key])}"
        elif trial.estimate is None:
            yield f"run         {trial.name}"
        else:
            outcome = "run" if trial.estimate.fits else "oom"
            step = f"predicted {trial.estimate.step_time_s:.3f} s a step" if trial.estimate.knows_time else NO_TIME
            yield f"{outcome:<11} {trial.name}: {step}"


def _to_document(trial: Trial) -> dict[str, object]:
    estimate = trial.estimate
    return {
        "key": trial.key, "overrides": list(trial.overrides),
        "layout": asdict(trial.run.layout) if trial.run else None, "problems": list(trial.problems),
        "fits": estimate.fits if estimate else None,
        "step_time_s": estimate.step_time_s if estimate and estimate.knows_time else None,
    }  # fmt: skip
