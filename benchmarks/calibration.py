"""Predictions after `dtlayout calibrate` against a sweep that no constant has seen.

    make bench NAME=calibration

Calibrates this machine, sweeps benchmarks/unseen on it three times, one after the other, and compares. Twenty minutes
in which it should have nothing else to do; --folder keeps everything, and goes on with what is there.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.pages.markdown import made_by, table
from dtlayout.calibrate.clock import ProcessorWatch
from dtlayout.cli import main as dtlayout
from dtlayout.sweep.results import Journal, TrialResult, sort_by_time
from dtlayout.sweep.run import SweepObserver, run_sweep
from dtlayout.sweep.spec import Sweep, make_trials, read_sweep

RANKS, REPEATS = 4, 3
SWEEP = Path(__file__).parent / "unseen" / "sweep.toml"


def main() -> int:
    """Print the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="where measurements are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        lab, busy = folder / "lab.toml", ProcessorWatch()
        probes_error = calibrate(lab)
        sweep = replace(read_sweep(SWEEP), overrides=(f"--cluster.file={lab}",))
        repeats = [run_trials(sweep, folder / f"sweep-{i + 1}") for i in range(REPEATS)]
        print("\n".join(report(probes_error, repeats, busy.steal())))
    return 0


def calibrate(lab: Path) -> float:
    """Write the cluster file of this machine, unless it is there; how far off its probes are predicted."""
    said = lab.with_suffix(".json")
    if not said.exists():
        said.write_text(run_command("calibrate", "--ranks", str(RANKS), "--out", str(lab), "--json"))
    return float(json.loads(said.read_text())["median_error"])


def run_command(*arguments: str) -> str:
    """Text that a command of dtlayout prints; the program ends with its exit code if it fails."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if exit_code := dtlayout(arguments):
            sys.exit(exit_code)
    return printed.getvalue()


def run_trials(sweep: Sweep, folder: Path) -> list[TrialResult]:
    """The trials of a sweep that ran, the fastest first; trials whose results the folder has are not run again."""
    folder.mkdir(exist_ok=True)
    tell = SweepObserver(on_result=lambda result: print(result.outcome, *result.overrides, file=sys.stderr))
    run_sweep(sweep, make_trials(sweep, folder), folder, tell)
    return sort_by_time(list(Journal(folder).read().values()))


@dataclass(frozen=True)
class Row:
    """A layout that ran in every repeat of the sweep."""

    name: str
    predicted_s: float
    steps_s: tuple[float, ...]
    """Measured seconds of a step in each repeat of the sweep."""

    @property
    def step_s(self) -> float:
        """The median of the repeats."""
        return median(self.steps_s)

    @property
    def error(self) -> float:
        """Relative error of the prediction, positive where it is too long."""
        return self.predicted_s / self.step_s - 1

    @property
    def spread(self) -> float:
        """Between the repeats, of their median."""
        return (max(self.steps_s) - min(self.steps_s)) / self.step_s


def report(probes_error: float, repeats: Sequence[Sequence[TrialResult]], taken: float) -> list[str]:
    """Lines of the page."""
    rows = sorted(join(repeats), key=lambda row: row.step_s)
    best, chosen = rows[0], min(rows, key=lambda row: row.predicted_s)
    error, biased = median(abs(row.error) for row in rows), median(row.error for row in rows)
    return [
        "# Predictions after a calibration\n",
        f"{made_by('calibration')}, {RANKS} ranks, {len(repeats)} sweeps.",
        f"Others had the processors for {taken:.0%} of the time.\n",
        f"- Steps of the probes, which the constants were fitted to: {probes_error:.1%} (median).",
        f"- **Steps of {len(rows)} layouts of a model that they have not seen: {error:.1%}** (median of the sizes;",
        f"  median with sign {biased:+.1%}); each is the median of its sweeps.",
        f"- **The layout that was predicted best is {chosen.step_s / best.step_s - 1:.1%} behind the best one**, which",
        f"  itself differs by {best.spread:.0%} between the sweeps.",
        f"- Between the sweeps the same layout differs by {median(row.spread for row in rows):.0%} (median).\n",
        *table(
            ["layout", *(f"sweep {i + 1}, s" for i in range(len(repeats))), "predicted", "error"],
            [[row.name, *(f"{s:.3f}" for s in (*row.steps_s, row.predicted_s)), f"{row.error:+.0%}"] for row in rows],
        ),
    ]


def join(repeats: Sequence[Sequence[TrialResult]]) -> Iterator[Row]:
    """Each layout that ran every time."""
    by_name = [{result.name: result for result in results} for results in repeats]
    for name, first in by_name[0].items():
        steps_s = [results[name].measured.step_time_s for results in by_name if name in results]
        predicted = first.run and first.run.predicted
        assert predicted and predicted.step_time_s, "it is calibrated"
        if len(steps_s) == len(repeats):
            yield Row(name, predicted.step_time_s, tuple(step_s for step_s in steps_s if step_s))


if __name__ == "__main__":
    sys.exit(main())
