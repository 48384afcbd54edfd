"""Signals in each phase of a run: every rank ends with code 3 in time, and the run goes on to the same bits.

Two ranks as tp2 that no torchrun watches, so that their own exit codes are seen. One run is stopped and started again
through all phases; compiled blocks, which have other bits, are a run of their own.
"""

import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.events import Amounts, Event, Kind
from benchmarks.faults.runs import (
    ENDLESS,
    Late,
    Start,
    compare,
    count_steps,
    find_all_damage,
    finish,
    is_saving,
    run_straight,
    say,
    started,
    wait_until,
)
from dtlayout.base.checkpoint_names import CHECKPOINTS, list_checkpoints, read_step
from dtlayout.base.errors import EXIT_DONE, EXIT_STOPPED

GRACE_S = 30.0
"""Seconds that torchrun gives its ranks to end. A compilation takes longer, and needs a longer --shutdown-timeout."""
STOPPED_S = 3.0
"""For how long a rank stands still by SIGSTOP."""
TP2 = ("--layout.pp=1", "--layout.tp=2")
HELD_OUT = ("--validation.source={folder}/held_out.txt", "--validation.batches=100")
BEGUN = "predicted: "
"""The last that a run prints before its first step."""


@dataclass(frozen=True)
class Phase:
    """When a signal comes."""

    name: str
    wait: Callable[[Start, int, random.Random], None]
    """Given the steps that were done when it started."""
    options: tuple[str, ...] = ()
    code: int = EXIT_STOPPED
    takes_all: bool = False
    """Whether all ranks get the signal each time, as from every launcher; else sometimes one alone."""
    stops_one: bool = False
    """Whether one rank stands still meanwhile."""
    compiles: bool = False
    grace_s: float = GRACE_S


def in_start(start: Start, began: int, chance: random.Random) -> None:
    """Anywhere between the first line of Python and the first step."""
    time.sleep(chance.uniform(0, START_UP_S))


def in_first_step(start: Start, began: int, chance: random.Random) -> None:
    """From the last line before it."""
    wait_until(lambda: BEGUN in start.said or start.is_ending, "beginning")
    time.sleep(chance.uniform(0, 0.3))


def in_compilation(start: Start, began: int, chance: random.Random) -> None:
    """Inductor takes more than this for the first block."""
    wait_until(lambda: BEGUN in start.said or start.is_ending, "beginning")
    time.sleep(chance.uniform(0.3, 6))


def in_steps(start: Start, began: int, chance: random.Random) -> None:
    """After the first ones."""
    wait_until(lambda: count_steps(start.run) >= began + 2 or start.is_ending, "steps")
    time.sleep(chance.uniform(0, 0.3))


def in_evaluation(start: Start, began: int, chance: random.Random) -> None:
    """A step is noted when its evaluation is over, and the next one's takes many times what a step does."""
    wait_until(lambda: count_steps(start.run) >= began + 1 or start.is_ending, "step")
    time.sleep(chance.uniform(0.5, 2))


def in_save(start: Start, began: int, chance: random.Random) -> None:
    """While a thread writes, or the run does at its end."""
    wait_until(lambda: (count_steps(start.run) > began and is_saving(start.run)) or start.is_ending, "save")
    time.sleep(chance.uniform(0, 0.05))


def in_save_of_stop(start: Start, began: int, chance: random.Random) -> None:
    """A second signal, while what the first one asked for is saved."""
    in_steps(start, began, chance)
    start.send(signal.SIGTERM, start.ranks)
    wait_until(lambda: is_saving(start.run) or start.is_ending, "save")


SELDOM = "--checkpoint.every=1000"
START_UP_S = 6.0
"""About what two small ranks take to their first step."""
PHASES = (
    Phase("start", in_start, takes_all=True),
    Phase("first step", in_first_step),
    Phase("compilation", in_compilation, ("--kernels.compile=blocks",), compiles=True, grace_s=150.0),
    Phase("later steps", in_steps, (SELDOM,)),
    Phase("evaluation", in_evaluation, (SELDOM, *HELD_OUT, "--validation.every=1")),
    Phase("saving in the background", in_save, ("--checkpoint.every=1",)),
    Phase("saving because of a signal", in_save_of_stop, (SELDOM,)),
    Phase("saving the last step", in_save, (SELDOM,), code=EXIT_DONE),
    Phase("waiting for a rank that stands still", in_steps, (SELDOM,), stops_one=True),
)
OTHERS = (signal.SIGINT, signal.SIGUSR1)


def provoke(folder: Path, amounts: Amounts, done: Sequence[Event]) -> Iterator[Event]:
    """SIGTERMs and one of each other signal in every phase, and the comparison of bits."""
    known = {event.what for event in done}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "held_out.txt").write_text("".join(f"{i} plus {i} is {i + i}. " for i in range(2000)))
    for compiles in (False, True):
        name = "compiled" if compiles else "eager"
        run, straight = folder / name, folder / f"straight-{name}"
        for phase in (phase for phase in PHASES if phase.compiles == compiles):
            numbers = [*[signal.SIGTERM] * amounts.signals, *OTHERS]
            for number, which in enumerate(numbers, start=1):
                if (what := f"{phase.name}, {number}: {which.name}") not in known:
                    yield stop(run, phase, which, what)
        options = (*TP2, "--kernels.compile=blocks") if compiles else TP2
        num_steps = count_steps(run) + 3
        problem = say(
            finish(run, num_steps, *options, num_ranks=2), run_straight(straight, num_steps, *options, num_ranks=2)
        )
        yield Event(kind="signals", what=f"bits, {name}", count=0, problem=problem or compare(run, straight))


def stop(run: Path, phase: Phase, which: signal.Signals, what: str) -> Event:
    """Start a run, signal it in a phase, and look how it ended."""
    chance, began = random.Random(what), count_steps(run)
    cache = run.with_name("inductor")
    shutil.rmtree(cache, ignore_errors=True)  # so that each start compiles
    last = began + 2 if phase.code == EXIT_DONE else ENDLESS
    options = (*TP2, *(option.format(folder=run.parent) for option in phase.options), f"--train.steps={last}")
    facts = {"phase": phase.name, "signal": which.name, "codes": [], "seconds": 0.0}
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    with started(run, *options, num_ranks=2, apart=True, environment=environment) as start:
        try:
            phase.wait(start, began, chance)
            ranks = start.ranks
            stopped = chance.choice(ranks) if phase.stops_one else None
            if stopped is not None:
                start.send(signal.SIGSTOP, [stopped])
                time.sleep(1.0)
            sent = time.monotonic()
            takers = ranks if phase.takes_all or chance.random() < 0.5 else [chance.choice(ranks)]
            start.send(which, takers)
            if stopped is not None:
                time.sleep(STOPPED_S)
                start.send(signal.SIGCONT, [stopped])
            codes = start.wait(phase.grace_s)
            facts |= {"codes": codes, "seconds": round(time.monotonic() - sent, 2)}
        except (Late, IndexError) as error:
            facts["seconds"] = phase.grace_s
            problem = f"{type(error).__name__} {error}: {start.said[-300:]}"
            return Event(kind="signals", what=what, problem=problem, facts=facts)
        said = start.said
    # Before Python has come to the first line of dtlayout, a signal does what it does to any program.
    is_early = phase.takes_all and set(codes) <= {phase.code, -which} and "steps " not in said
    problem = say(
        f"ended with {codes}: {said[-300:]}" if set(codes) != {phase.code} and not is_early else "",
        "a traceback was printed" if "Traceback" in said else "",
        find_all_damage(run),
        find_unsaved(run),
    )
    return Event(kind="signals", what=what, problem=problem, facts=facts)


def find_unsaved(run: Path) -> str:
    """Steps that were done and are in no checkpoint."""
    saved = max(map(read_step, list_checkpoints(run / CHECKPOINTS)), default=0)
    return f"{count_steps(run)} steps were done, {saved} are saved" if saved != count_steps(run) else ""


KIND = Kind(
    name="signals",
    title="SIGTERM, SIGINT and SIGUSR1 in each phase",
    promise="all ranks end with code 3 in time, all steps are saved, the run ends with the bits of one without faults",
    provoke=provoke,
    expected=lambda amounts: len(PHASES) * (amounts.signals + len(OTHERS)),
)
