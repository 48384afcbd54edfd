"""The n-th change of a file failing in a save, for every n, on the rank that writes most and on another one.

A run of pp2·tp2 saves after each step, and in the save of step n the n-th fails (failing_writes.py): one run has all of
them, and goes on until it has saved without.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.faults.events import Amounts, Event, Kind
from benchmarks.faults.runs import PP2_TP2, compare, find_all_damage, is_saving, run_straight, say, started

STEPS = {0: 48, 3: 16}
"""Rank → steps of its run: more than the changes of files that a save makes on this rank."""
OPTIONS = (*PP2_TP2, "--checkpoint.every=1")


def provoke(folder: Path, amounts: Amounts, done: Sequence[Event]) -> Iterator[Event]:
    """A run for each rank."""
    for rank, num_steps in STEPS.items():
        if (what := f"rank {rank}") not in {event.what for event in done}:
            yield run_failing(folder, what, rank, num_steps)


def run_failing(folder: Path, what: str, rank: int, num_steps: int) -> Event:
    """Train while one of each save's changes fails, and compare."""
    run, straight, failed = folder / f"rank-{rank}", folder / f"straight-{num_steps}", folder / f"failed-{rank}"
    shutil.rmtree(run, ignore_errors=True)
    failed.unlink(missing_ok=True)
    environment = {"DTLAYOUT_PLUGINS": "benchmarks.faults.failing_writes", "PYTHONPATH": "."}
    environment |= {"FAULT_RANK": str(rank), "FAULT_LOG": str(failed.absolute())}
    damage = ""
    with started(run, *OPTIONS, f"--train.steps={num_steps}", environment=environment) as start:
        while not start.is_over and not damage:
            damage = find_all_damage(run)
        codes, said = start.wait(), start.said
    steps = [int(line.split()[0]) for line in failed.read_text().splitlines()] if failed.exists() else []
    unsaid = [n for n in steps if f"step {n} is not saved" not in said and f"step-{n:08d}\n" not in said]
    problem = say(
        f"ended with {codes}: {said[-300:]}" if codes != [0] else "",
        f"damaged while it ran: {damage}" if damage else "",
        f"{len(steps)} failed, the last in the save of step {max(steps, default=0)}"
        if set(steps) != set(range(1, len(steps) + 1)) or len(steps) >= num_steps
        else "",
        f"nothing was said of the saves of steps {unsaid}" if unsaid else "",
        "a save that failed is still there" if is_saving(run) else "",
        run_straight(straight, num_steps, *OPTIONS),
    )
    not_saved = sum(f"step {n} is not saved" in said for n in steps)
    facts = {"rank": rank, "not_saved": not_saved}
    return Event(kind="writes", what=what, problem=problem or compare(run, straight), count=len(steps), facts=facts)


KIND = Kind(
    name="writes",
    title="the n-th write failing in a save, for every n",
    promise="the save is said to have failed, what is left is whole, training goes on, the next one succeeds",
    provoke=provoke,
    expected=lambda amounts: 30,
)
