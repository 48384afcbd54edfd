"""Kills of a run's ranks at random times: does it end with the bits of one that nobody interrupted?

`python -m benchmarks.faults --kills 50` trains on 4 ranks as pp2·tp2 on this CPU, saving each third step, and kills a
rank by SIGKILL, again and again: at a random time, or, for as many as `--inside`, while a checkpoint is being written.
The same command goes on each time, as a scheduler would have it. At the end the files of the last checkpoint must be
those of a straight run, hash for hash, and so must every loss. Prints a page.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dtlayout.checkpoint.manifest import find_damage, list_checkpoints, read_manifest
from dtlayout.training.metrics import MetricsFile

LAYOUT = ("--layout.pp=2", "--layout.tp=2", "--layout.micro_batch=2", "--layout.schedule=1f1b")
CONSTANT = ("--optimizer.min_lr_ratio=1", "--optimizer.warmup_steps=0")
"""A learning rate that does not depend on how long the run is, which nobody knows before the kills."""
SIZES = ("--model.hidden_size=64", "--model.ffn_size=96", "--batch.seq_len=32", "--batch.global_batch=8")
EVERY = 3
LIMIT_S = 300
"""Longest that an attempt may take."""


def start(run: Path, log: Path, num_steps: int) -> subprocess.Popen[bytes]:
    """The run, or the rest of it."""
    options = (
        *LAYOUT,
        *SIZES,
        *CONSTANT,
        f"--train.steps={num_steps}",
        f"--checkpoint.every={EVERY}",
        "--checkpoint.keep=2",
    )
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    command = [sys.executable, *launcher, "train.py", "configs/debug.toml", *options, f"--train.run_folder={run}"]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)


def find_ranks(agent: int) -> list[int]:
    """The processes that an agent of torchrun has started."""
    children = Path(f"/proc/{agent}/task/{agent}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def count_steps(run: Path) -> int:
    """Steps that metrics.jsonl has."""
    return len(MetricsFile(run / "metrics.jsonl").read())


def kill_once(run: Path, log: Path, num_steps: int, chance: random.Random, *, inside: bool) -> tuple[bool, bool]:
    """Whether a rank was killed before the run was done, and whether a checkpoint was being written then."""
    process, began = start(run, log, num_steps), count_steps(run)
    # Begin to count when it trains again: earlier kills only repeat the start.
    due, deadline = None, time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        is_writing = any((run / "checkpoints").glob("partial-*"))
        if due is None and count_steps(run) > began:
            due = time.monotonic() + chance.uniform(0.5, 4.0)
        if due is not None and time.monotonic() >= due and (is_writing or not inside):
            time.sleep(chance.uniform(0, 0.02))
            ranks = find_ranks(process.pid)
            was_writing = any((run / "checkpoints").glob("partial-*"))
            if ranks:
                os.kill(chance.choice(ranks), signal.SIGKILL)
                process.wait(timeout=LIMIT_S)
                return True, was_writing
        time.sleep(0.002)
    process.wait(timeout=LIMIT_S)
    return False, False


def finish(run: Path, log: Path, num_steps: int) -> int:
    """Exit code of what is left of a run."""
    return start(run, log, num_steps).wait(timeout=2 * LIMIT_S)


def main() -> int:
    """Run straight, run with kills, compare, and print the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument(
        "--inside", type=int, default=20, help="how many of them at least while a checkpoint is written"
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        straight, killed, log = (Path(folder, name) for name in ("straight", "killed", "log"))
        kills = inside = damaged = 0
        while kills < options.kills:
            done, was_inside = kill_once(killed, log, options.steps, chance, inside=inside < options.inside)
            if not done:
                break
            kills, inside = kills + 1, inside + was_inside
            damaged += sum(bool(find_damage(path)) for path in list_checkpoints(killed / "checkpoints"))
            print(f"{kills} kills, {inside} inside a save, {count_steps(killed)} steps", file=sys.stderr, flush=True)
        num_steps = count_steps(killed) + 20  # so that what follows is short
        codes = [finish(run, log, num_steps) for run in (killed, straight)]
        found = [find_bits(run) if code == 0 else None for run, code in zip((killed, straight), codes, strict=True)]
        is_equal = found[0] is not None and found[0] == found[1]
        left = [path.name for path in (killed / "checkpoints").glob("partial-*")]
    print("# Kills\n")
    print(f"`python -m benchmarks.faults --kills {options.kills} --inside {options.inside} --seed {options.seed}`\n")
    print(
        "| ranks killed | of them inside a save | damaged checkpoints found | steps | ends | bits of a straight run |"
    )
    print("|---|---|---|---|---|---|")
    print(f"| {kills} | {inside} | {damaged} | {num_steps} | {codes[0]} | {'the same' if is_equal else 'others'} |")
    return 0 if is_equal and not left and kills == options.kills else 1


def find_bits(run: Path) -> tuple[object, ...]:
    """All losses, and hashes of the tensors of the last checkpoint."""
    newest = list_checkpoints(run / "checkpoints")[-1]
    manifest = read_manifest(newest)
    assert manifest is not None, "this version writes one"
    hashes = {name: file["sha256"] for name, file in manifest["files"].items() if name.endswith(".distcp")}
    return newest.name, hashes, [line["loss"] for line in MetricsFile(run / "metrics.jsonl").read()]


if __name__ == "__main__":
    sys.exit(main())
