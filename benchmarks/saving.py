"""Cost of checkpoints: time of steps without any, with one each tenth step, and with the run waiting for it.

`python -m benchmarks.saving` runs them in turn on this CPU and prints a page: medians of rounds, from the end of the
tenth step to the end of the last. Once with a core more than there are ranks, as a node with GPUs has many, and once
with a rank on each of two cores, where writing takes its time from training.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from dtlayout.base.formatting import plural

EVERY, STEPS = 10, 41
RANKS = (1, 2)
MODES = {
    "no checkpoint": ("--checkpoint.save=false",),
    "each tenth step, in the background": (f"--checkpoint.every={EVERY}",),
    "each tenth step, waited for": (f"--checkpoint.every={EVERY}", "--checkpoint.background=false"),
}
MODEL = ("hidden_size=384", "num_layers=8", "num_heads=6", "num_kv_heads=6", "ffn_size=1024")


def run(mode: str, num_ranks: int, folder: Path) -> tuple[float, float]:
    """Seconds a step, and the largest resident set of any of its processes in MB."""
    options = [*(f"--model.{size}" for size in MODEL), "--layout.pp=1", "--layout.tp=1", "--layout.micro_batch=2"]
    options += ["--batch.global_batch=4", f"--train.steps={STEPS}", f"--train.run_folder={folder}"]
    options += ["--metrics.log_every=1", "--metrics.memory_every=1000", *MODES[mode]]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    command = [sys.executable, *launcher, "train.py", "configs/debug.toml", *options]
    ends = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step") and "loss" in line:
                ends[int(line.split()[1].partition("/")[0])] = time.perf_counter()
        _, status, usage = os.wait4(process.pid, 0)  # of it and of all that it has waited for
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    last = STEPS - 1  # the last one's checkpoint is waited for in any case
    return (ends[last] - ends[EVERY - 1]) / (last - EVERY + 1), usage.ru_maxrss / 1e3


def main() -> None:
    """Run all in rounds, and print the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("# What checkpoints cost\n")
    print(
        f"`make bench NAME=saving`: {os.cpu_count()} CPU cores, a model of 14 million parameters and 170 MB of state,\n"
        f"{options.rounds} alternating rounds of {STEPS - EVERY} steps, medians. *Of none*: the rounds' median ratio.\n"
    )
    print("| ranks | checkpoints | s a step | of none | rounds | largest process, MB |\n|--:|---|--:|--:|---|--:|")
    for num_ranks in RANKS:
        found: dict[str, list[float]] = defaultdict(list)
        peaks: dict[str, list[float]] = defaultdict(list)
        for _ in range(options.rounds):
            for mode in MODES:
                with tempfile.TemporaryDirectory() as folder:
                    seconds, peak = run(mode, num_ranks, Path(folder, "run"))
                found[mode].append(seconds)
                peaks[mode].append(peak)
                print(f"{plural(num_ranks, 'rank')}, {mode}: {seconds:.3f} s a step", file=sys.stderr, flush=True)
        none = next(iter(MODES))
        for mode, steps_s in found.items():
            ratios = [one / other for one, other in zip(steps_s, found[none], strict=True)]
            print(
                f"| {num_ranks} | {mode} | {statistics.median(steps_s):.3f} | x {statistics.median(ratios):.3f} "
                f"| {min(ratios):.3f} to {max(ratios):.3f} | {statistics.median(peaks[mode]):.0f} |"
            )


if __name__ == "__main__":
    main()
