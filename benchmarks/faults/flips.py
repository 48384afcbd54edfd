"""A byte that changes in each file of the newest checkpoint in turn, before a run goes on from it."""

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.faults.events import Amounts, Event, Kind
from benchmarks.faults.runs import PP2_TP2, compare, run_straight, say, started
from dtlayout.base.checkpoint_names import CHECKPOINTS

EVERY, LAST = 3, 9
OPTIONS = (*PP2_TP2, f"--checkpoint.every={EVERY}", "--checkpoint.keep=3", f"--train.steps={LAST}")
NEWEST, BEFORE = "step-00000006", "step-00000003"


def provoke(folder: Path, amounts: Amounts, done: Sequence[Event]) -> Iterator[Event]:
    """One flip a file."""
    straight, run = folder / "straight", folder / "flipped"
    if problem := run_straight(straight, LAST, *OPTIONS):
        yield Event(kind="flips", what="straight", problem=problem, count=0)
        return
    whole = straight / CHECKPOINTS / NEWEST
    known = {event.what for event in done}
    for name in sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file()):
        what = f"a byte of {name}"
        if what not in known:
            shutil.rmtree(run, ignore_errors=True)
            yield Event(kind="flips", what=what, problem=go_on(copy_until(straight, run), straight, name))


def copy_until(straight: Path, run: Path) -> Path:
    """A copy of the run as a kill after its newest checkpoint but one would have left it."""
    shutil.copytree(straight, run, symlinks=True)
    shutil.rmtree(run / CHECKPOINTS / f"step-{LAST:08d}")
    (run / "summary.json").unlink()
    return run


def go_on(run: Path, straight: Path, name: str) -> str:
    """The problem with a run that goes on after a byte of a file has changed."""
    path = run / CHECKPOINTS / NEWEST / name
    content = bytearray(path.read_bytes())
    content[random.Random(name).randrange(len(content))] ^= 0x10
    path.write_bytes(content)
    with started(run, *OPTIONS) as start:
        codes, said = start.wait(), start.said
    missing = [
        f"not said: {line}"
        for line in (f"{NEWEST} is damaged, an older one is tried: {name} ", f"{BEFORE} after {EVERY} steps")
        if line not in said
    ]
    return say(*missing, f"ended with {codes}" if codes != [0] else "", compare(run, straight))


KIND = Kind(
    name="flips",
    title="a byte changed in each file of the newest checkpoint in turn",
    promise="the run names the file, goes on from the checkpoint before, and ends with the bits of one without faults",
    provoke=provoke,
    expected=lambda amounts: 7,  # a file of each rank, its index, state and manifest
)
