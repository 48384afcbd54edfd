"""Predictions after `dtlayout calibrate` against a sweep that no constant has seen, as Markdown.

    make bench-calibrate

Calibrates this machine, sweeps benchmarks/unseen on it, and compares. Some ten minutes in which it should have nothing
else to do; --folder keeps both, and goes on with what is there.
"""

import argparse
import contextlib
import os
import platform
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

from dtlayout.calibrate.clock import Busy
from dtlayout.cli import main as dtlayout
from dtlayout.cluster import load_cluster
from dtlayout.report.record import make_record
from dtlayout.sweep.results import Journal, TrialResult
from dtlayout.sweep.run import run_sweep
from dtlayout.sweep.spec import make_trials, read_sweep

RANKS = 4
SWEEP = Path(__file__).parent / "unseen" / "sweep.toml"


def main() -> int:
    """Write the report to stdout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="where measurements are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        lab, swept, busy = folder / "lab.toml", folder / "sweep", Busy()
        if not lab.exists():
            with contextlib.redirect_stdout(sys.stderr):
                if exit_code := dtlayout(["calibrate", "--ranks", str(RANKS), "--out", str(lab)]):
                    return exit_code
        swept.mkdir(exist_ok=True)
        sweep = replace(read_sweep(SWEEP), overrides=(f"--cluster.file={lab}",))
        trials = make_trials(sweep, swept)
        for result in run_sweep(sweep, trials, swept, done=Journal(swept).read().keys()):
            print(result.outcome, *result.overrides, file=sys.stderr)
        print("\n".join(report(lab, swept, busy.taken())))
    return 0


def report(lab: Path, swept: Path, taken: float) -> list[str]:
    """Its lines."""
    results = [r for r in Journal(swept).read().values() if r.outcome == "ok" and r.step_time_s]
    record, cluster = make_record(swept), load_cluster(lab)
    biased = median(_error(r) for r in results)
    return [
        "# Predictions after a calibration\n",
        f"{datetime.now(UTC):%Y-%m-%d}, `make bench-calibrate`: torch {torch.__version__}, {os.cpu_count()} CPU cores,",
        f"{platform.machine()}, {RANKS} ranks. Others had the processors for {taken:.0%} of the time.\n",
        f"- Steps of the probes, which the constants were fitted to: {cluster.gpu.prediction_error:.1%} (median).",
        f"- **Steps of {record.runs} layouts of a model that they have not seen: {record.error:.1%}** (median of the",
        f"  sizes; median with sign {biased:+.1%}).",
        f"- **The layout that was predicted best is {record.regret:.1%} behind the best one.**\n",
        "| layout | step, s | between quartiles | predicted | error |",
        "|---|--:|--:|--:|--:|",
        *(_describe(r) for r in sorted(results, key=lambda r: r.step_time_s or 0)),
    ]


def _error(result: TrialResult) -> float:
    assert result.predicted and result.predicted.step_time_s and result.step_time_s, "a CPU is always predicted"
    return result.predicted.step_time_s / result.step_time_s - 1


def _describe(r: TrialResult) -> str:
    name = " ".join(override.rpartition(".")[2] for override in r.overrides)
    assert r.predicted, "a CPU is always predicted"
    steps = [r.step_time_s or 0.0, r.step_time_spread_s or 0.0, r.predicted.step_time_s or 0.0]
    return f"| {name} | {' | '.join(f'{step:.3f}' for step in steps)} | {_error(r):+.0%} |"


if __name__ == "__main__":
    sys.exit(main())
