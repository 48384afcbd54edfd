"""SIGKILL to one rank, again and again: at uniformly random moments of its life, then of saves until enough were hit.

On 4 ranks as pp2·tp2, saving each third step. torchrun starts the ranks again three times; then, as a scheduler would,
the same command is given again. What is counted as inside a save has left a checkpoint that is not whole.
"""

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.faults.events import Amounts, Event, Kind
from benchmarks.faults.runs import (
    ENDLESS,
    PP2_TP2,
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

OPTIONS = (*PP2_TP2, "--checkpoint.every=3")
RESTARTS = 3
TRIES = 3
"""Most kills for each one that was asked for, until enough have fallen inside a save."""


def provoke(folder: Path, amounts: Amounts, done: Sequence[Event]) -> Iterator[Event]:
    """Kills, and the comparison of bits."""
    run, straight = folder / "killed", folder / "straight"
    events = [event for event in done if event.count]
    if is_short_of(events, amounts):
        start_up_s, save_s = rehearse(folder / "rehearsal")
        with ExitStack() as stack:
            start, killed = None, list[set[int]]()
            while is_short_of(events, amounts):
                if start is None or len(killed) > RESTARTS or start.is_over:
                    stack.close()
                    start = stack.enter_context(started(run, *OPTIONS, f"--train.steps={ENDLESS}", restarts=RESTARTS))
                    killed = []
                is_aimed = len(events) >= amounts.kills  # all that were asked for came at any time
                event = kill(start, killed, len(events) + 1, start_up_s, save_s if is_aimed else None)
                events.append(event)
                yield event
    num_steps = count_steps(run) + 10
    problem = say(finish(run, num_steps, *OPTIONS), run_straight(straight, num_steps, *OPTIONS))
    left = "a save that was not finished is still there" if is_saving(run) else ""
    yield Event(
        kind="kills",
        what="bits",
        count=0,
        problem=problem or say(compare(run, straight), left),
        facts={"steps": num_steps},
    )


def is_short_of(events: Sequence[Event], amounts: Amounts) -> bool:
    """Whether there are to be more kills."""
    inside = sum(event.facts["moment"] == "save" for event in events)
    wanted = len(events) < amounts.kills or inside < amounts.inside
    return wanted and len(events) < TRIES * amounts.kills


def rehearse(run: Path) -> tuple[float, float]:
    """Seconds from the start of the ranks to the end of their first step, and of the longest save."""
    with started(run, *OPTIONS, f"--train.steps={ENDLESS}") as start:
        began = count_steps(run)
        wait_until(lambda: len(start.ranks) == 4, "ranks")
        born = time.monotonic()
        wait_until(lambda: count_steps(run) > began, "step")
        start_up_s, saves_s = time.monotonic() - born, []
        for _ in range(3):
            wait_until(lambda: is_saving(run), "save")
            born = time.monotonic()
            wait_until(lambda: not is_saving(run), "end of a save")
            saves_s.append(time.monotonic() - born)
    return start_up_s, max(saves_s)


def kill(start: Start, killed: list[set[int]], number: int, start_up_s: float, save_s: float | None) -> Event:
    """Kill a rank of those that are started next, in a save if it is said how long one takes."""
    chance, run, what = random.Random(number), start.run, f"kill {number}"
    try:
        wait_until(lambda: len(set(start.ranks) - set().union(*killed)) == 4 or start.is_over, "ranks")
        ranks, born, began = start.ranks, time.monotonic(), count_steps(run)
        killed.append(set(ranks))
        if save_s is None:
            # As long after the first step as before it, on average: half of all kills come while it starts.
            due = born + chance.uniform(0, 2 * start_up_s)
            wait_until(lambda: time.monotonic() >= due or start.is_over, "time")
        else:
            wait_until(lambda: count_steps(run) > began or start.is_over, "step")
            due = time.monotonic() + chance.uniform(0, start_up_s / 2)
            wait_until(lambda: time.monotonic() >= due and (is_saving(run) or start.is_over), "save")
            time.sleep(chance.uniform(0, save_s))
        if start.is_over:
            return Event(kind="kills", what=what, problem=f"ended by itself: {start.said[-300:]}", facts={"moment": ""})
        at_s, steps = time.monotonic() - born, count_steps(run)
        rank = chance.randrange(4)
        os.kill(ranks[rank], signal.SIGKILL)
        wait_until(lambda: not set(ranks) & set(start.ranks), "end of the other ranks")
    except (Late, ProcessLookupError) as error:
        return Event(kind="kills", what=what, problem=f"{type(error).__name__} {error}", facts={"moment": ""})
    # Before a step of its own, what is there of a save is an earlier kill's.
    moment = "start" if steps <= began else "save" if is_saving(run) else "steps"
    facts = {"moment": moment, "rank": rank, "at_s": round(at_s, 2), "steps": steps}
    return Event(kind="kills", what=what, problem=find_all_damage(run), facts=facts)


KIND = Kind(
    name="kills",
    title="SIGKILL of a random rank, 4 ranks as pp2·tp2",
    promise="no checkpoint is damaged, and all losses and the last checkpoint have the bits of a run without faults",
    provoke=provoke,
    expected=lambda amounts: amounts.kills,
)
