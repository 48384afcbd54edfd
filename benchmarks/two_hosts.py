"""tp across hosts against tp inside one, on two network namespaces with a slow link between them.

    sudo make bench NAME=two_hosts

Calibrates both hosts together, asks `recommend`, runs configs/sweeps/debug-2hosts.toml on them, and then the same
layouts on one host. A quarter of an hour in which the machine should have nothing else to do; --folder keeps
everything, and goes on with what is there. It needs root.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.calibration import run_command, run_trials
from benchmarks.pages.markdown import made_by, table
from dtlayout.config.loading import load_config
from dtlayout.sweep.results import TrialResult
from dtlayout.sweep.spec import Sweep, read_sweep

SWEEP = Path("configs", "sweeps", "debug-2hosts.toml")
CHOICES = ("tp=4", "tp=2,pp=2", "pp=4")
"""All ranks in one copy of the model: tp across the hosts, tp inside with pp across, pp across alone."""


def main() -> int:
    """Print the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="where measurements are kept")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("two hosts on one machine need root", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        hosts, sweep = folder / "hosts.toml", read_sweep(SWEEP)
        if not hosts.exists():
            calibrate(sweep, hosts)
        beforehand = {choice: ask(sweep, hosts, choice) for choice in CHOICES}
        known = replace(sweep, overrides=(*sweep.overrides, f"--cluster.file={hosts}"))
        across = run_trials(known, folder / "two-hosts")
        inside = run_trials(replace(sweep, launch=""), folder / "one-host")
        print("\n".join(report(sweep, beforehand, across, inside)))
    return 0


def calibrate(sweep: Sweep, hosts: Path) -> None:
    """Write the cluster file of both hosts, measured together over the link that the sweep has."""
    measured = hosts.with_name("measured.json")
    start = sweep.launch.partition(" -- ")[0].format(python=sys.executable).split()
    subprocess.run([*start, "--", "-m", "dtlayout.calibrate.ranks", str(measured)], stdout=sys.stderr, check=True)
    print(run_command("calibrate", "--measured", str(measured), "--out", str(hosts)), file=sys.stderr)


def ask(sweep: Sweep, hosts: Path, choice: str) -> dict[str, Any]:
    """The answer of `recommend` for a choice, as JSON; nothing has run yet."""
    trained, model = load_config(sweep.config, sweep.overrides), hosts.with_name("model.toml")
    model.write_text(trained.to_toml())
    command = ["recommend", "--json", "--model", str(model), "--cluster", str(hosts), "--why-not", choice]
    command += ["--seq-len", str(trained.batch.seq_len), "--global-batch", str(trained.batch.global_batch)]
    command += ["--precision", f"compute={trained.precision.compute}"]
    command += ["--fix", f"micro_batch={trained.layout.micro_batch}"]
    return json.loads(run_command(*command))["why_not"]


def report(
    sweep: Sweep, beforehand: dict[str, dict[str, Any]], across: Sequence[TrialResult], inside: Sequence[TrialResult]
) -> list[str]:
    """Lines of the page."""
    alone = {result.name: result for result in inside}
    rows = [(result, alone[result.name]) for result in across if result.name in alone]
    return [
        "# tp inside a host against tp across hosts\n",
        f"{made_by('two_hosts')}.",
        f"`{sweep.launch.partition(' -p')[0]}`: two hosts of two ranks each, and the link between them;",
        f"`{SWEEP}`.\n",
        "## What `recommend` says of the calibrated hosts, before anything runs\n",
        *(_say(choice, said) for choice, said in beforehand.items()),
        "\n## What ran\n",
        *table(
            ["layout", "step, s", "between quartiles", "predicted", "on one host, s", "what two hosts cost"],
            [_compare(apart, together) for apart, together in rows],
        ),
    ]


def _say(choice: str, said: dict[str, Any]) -> str:
    best = said["best_with_these_choices"]
    return f"- **{choice}**: {best['step_time_s']:.2f} s a step at best. {'; '.join(said['problems'])}."


def _compare(apart: TrialResult, together: TrialResult) -> list[str]:
    across, inside = apart.measured, together.measured
    assert across.step_time_s and inside.step_time_s, "only what ran is compared"
    predicted = apart.run and apart.run.predicted
    assert predicted and predicted.step_time_s, "the hosts are calibrated"
    steps = [across.step_time_s, across.step_time_spread_s or 0.0, predicted.step_time_s, inside.step_time_s]
    return [apart.name, *(f"{step:.2f}" for step in steps), f"×{across.step_time_s / inside.step_time_s:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
