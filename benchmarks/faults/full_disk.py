"""A run on a disk that is full for a while: a tmpfs in a mount namespace of its own, which needs no root.

`python -m benchmarks.faults.full_disk FOLDER` is what runs there, and prints what came of it.
"""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.faults.events import Amounts, Event, Kind
from benchmarks.faults.runs import (
    ENDLESS,
    PP2_TP2,
    Late,
    compare,
    count_steps,
    find_all_damage,
    finish,
    run_straight,
    say,
    started,
    wait_until,
)
from dtlayout.base.checkpoint_names import CHECKPOINTS, list_checkpoints

OPTIONS = (*PP2_TP2, "--checkpoint.every=3")
NUM_FAILED = 6
"""Saves that are due while the disk is full: in that many steps metrics.jsonl would have grown by a page too."""
SIZE = "24m"
"""Room for several checkpoints."""


def provoke(folder: Path, amounts: Amounts, done: Sequence[Event]) -> Iterator[Event]:
    """One run."""
    if done:
        return
    inside = ["unshare", "--map-root-user", "--mount", sys.executable, "-m", "benchmarks.faults.full_disk", str(folder)]
    ended = subprocess.run(inside, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        problem = f"there is no small disk here: unshare or mount ended with {ended.returncode}"
        yield Event(kind="full disk", what="tmpfs", problem=problem)
    else:
        yield Event(**json.loads(ended.stdout))


def main(folder: Path) -> int:
    """Fill the disk below a run, make room again, and print the event."""
    disk = folder / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)], check=True)
    run, straight, ballast = disk / "run", folder / "straight", disk / "ballast"
    run.mkdir()
    try:
        with started(run, *OPTIONS, f"--train.steps={ENDLESS}", log=folder / "run.log") as start:
            wait_until(lambda: "saved" in start.said or start.is_over, "save")

            def has_failed() -> bool:
                fill(ballast)  # what a save has just given back too
                return start.said.count("is not saved, training goes on") >= NUM_FAILED or start.is_over

            wait_until(has_failed, "failed saves", every_s=0.05)
            damage, num_whole = find_all_damage(run), len(list_checkpoints(run / CHECKPOINTS))
            ballast.unlink()
            saves = start.said.count("\nsaved")
            wait_until(lambda: start.said.count("\nsaved") > saves or start.is_over, "save once there was room")
            problem = say(damage, "" if num_whole else "no checkpoint was left")
            if start.is_over:
                problem = say(problem, f"the run has ended: {start.said[-600:]}")
            facts = {
                "not saved": start.said.count("is not saved, training goes on"),
                "metrics waited": "its lines wait" in start.said,
            }
    except Late as error:
        problem, facts = str(error), {}
    if not problem:
        num_steps = count_steps(run) + 10
        problem = say(
            finish(run, num_steps, *OPTIONS, log=folder / "run.log"), run_straight(straight, num_steps, *OPTIONS)
        )
        problem = problem or compare(run, straight)
    print(json.dumps(asdict(Event(kind="full disk", what="tmpfs", problem=problem, facts=facts))))
    return 0


def fill(ballast: Path) -> None:
    """Take all the room there is."""
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC, "the disk is full"
        os.fsync(file.fileno())


KIND = Kind(
    name="full disk",
    title=f"a disk that is full for a while (tmpfs of {SIZE})",
    promise="the run says that it cannot save, keeps the last good checkpoint, trains on, saves once there is room",
    provoke=provoke,
    expected=lambda amounts: 1,
)

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
