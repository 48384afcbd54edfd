"""Runs that want one folder: two launchers of one name, one who comes back at the worst moment, wrong clocks."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from benchmarks.faults.events import Amounts, Event, Kind
from benchmarks.faults.runs import (
    ALONE,
    ENDLESS,
    Late,
    compare,
    count_steps,
    find_all_damage,
    find_port,
    finish,
    run_straight,
    say,
    started,
    wait_until,
)
from dtlayout.base import lease
from dtlayout.base.checkpoint_names import CHECKPOINTS, list_checkpoints
from dtlayout.base.errors import InvalidConfig
from dtlayout.base.process import is_stopped
from dtlayout.training.metrics import MetricsFile

OPTIONS = (*ALONE, "--checkpoint.every=3")
RESTARTS = 20
"""The --max-restarts that docs/guide/cluster.md recommends beside a fixed --rdzv-id."""


def provoke_theft(folder: Path, amounts: Amounts, done: Sequence[Event]) -> Iterator[Event]:
    """A second torchrun in the folder of a run that lives, with its --rdzv-id, until it has no restarts left."""
    run = folder / "run"
    known = {event.what for event in done}
    if "attack" not in known:
        yield attack(run)
    yield _compare_bits("stolen lease", run, folder / "straight")


def attack(run: Path) -> Event:
    """Start a run, and another launcher in its folder; each of that one's starts is a try to steal it."""

    def name() -> list[str]:
        return ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{find_port()}", "--rdzv-id", "mine"]

    options, began = (*OPTIONS, f"--train.steps={ENDLESS}"), count_steps(run)
    logs = [run.with_name(f"{which}.log") for which in ("first", "second")]
    launch = partial(started, run, *options, num_ranks=1, restarts=RESTARTS)
    try:
        with launch(log=logs[0], meeting=name()) as first:
            wait_until(lambda: count_steps(run) > began or first.is_over, "step")
            (owner,) = first.ranks
            with launch(log=logs[1], meeting=name()) as second:
                codes = second.wait()
                said = second.said
            problem = say(
                "" if first.ranks == [owner] else f"the first run has lost its folder: {first.said[-300:]}",
                "" if set(codes) == {1} else f"the second launcher ended with {codes}",
                "" if "belongs to another run" in said else f"it does not say whose the folder is: {said[-300:]}",
                "the folder was taken over" if "taken over" in said + first.said else "",
                find_all_damage(run),
            )
            first.send(signal.SIGTERM, first.ranks)
            first.wait()
    except (Late, ValueError) as error:
        problem, said = f"{type(error).__name__} {error}", ""
    starts = said.count("belongs to another run")
    steps = [line["step"] for line in MetricsFile(run / "metrics.jsonl").read()]
    doubled = "" if steps == list(range(1, len(steps) + 1)) else f"steps were written twice: {steps}"
    return Event(
        kind="stolen lease",
        what="attack",
        count=max(1, starts),
        problem=say(problem, doubled),
        facts={"starts": starts, "ended at once": said.count("not tried again")},
    )


MOMENTS = ("look", "rename")
"""Before which the first run stands still, in its save."""


def provoke_takeovers(folder: Path, amounts: Amounts, done: Sequence[Event]) -> Iterator[Event]:
    """At each moment, with the one who took over in its save of the same step, and after it."""
    run, known = folder / "run", {event.what for event in done}
    for moment in MOMENTS:
        for is_whole in (False, True):
            what = f"before the {moment}, the other one {'has saved' if is_whole else 'saves'} the same step"
            if what not in known:
                yield take_over(run, moment, what, is_whole=is_whole)
    yield _compare_bits("takeover", run, folder / "straight")


def take_over(run: Path, moment: str, what: str, *, is_whole: bool) -> Event:
    """Stop a run in its save, have another one take it over, and let the first one go on."""
    signs = run.with_name("signs")
    signs.mkdir(parents=True, exist_ok=True)
    for sign in signs.iterdir():
        sign.unlink()
    environment = {"DTLAYOUT_PLUGINS": "benchmarks.faults.stalling", "PYTHONPATH": ".", "FAULT_SIGNS": str(signs)}
    first_of, second_of = ({**environment, "FAULT_STALLS": moment}, {**environment, "FAULT_WAITS": "1"})
    options, logs = (
        (*OPTIONS, f"--train.steps={ENDLESS}"),
        [run.with_name(f"{which}.log") for which in ("first", "second")],
    )
    launch = partial(started, run, *options, num_ranks=1, apart=True)
    try:
        with launch(log=logs[0], environment=first_of) as first:
            pid = first.processes[0].pid
            wait_until(lambda: is_stopped(pid) or first.is_over, "standstill")
            with launch(log=logs[1], environment=second_of) as second:
                wait_until(lambda: (signs / "saving").exists() or second.is_over, "save of the second run")
                partials = list((run / CHECKPOINTS).glob("partial-*"))
                if is_whole:
                    (signs / "go on").touch()
                    wait_until(lambda: "saved" in second.said or second.is_over, "saved step")
                before = [path.name for path in list_checkpoints(run / CHECKPOINTS)]
                first.send(signal.SIGCONT, [pid])
                codes = first.wait()
                after = [path.name for path in list_checkpoints(run / CHECKPOINTS)]
                problem = say(
                    "" if codes != [0] else "the first run has ended as if all were well",
                    "" if is_whole or after == before else f"{set(after) - set(before)} was published meanwhile",
                    "" if is_whole or all(path.exists() for path in partials) else "what was being saved is gone",
                    find_all_damage(run),
                )
                (signs / "go on").touch()
                wait_until(lambda: "saved" in second.said or second.is_over, "saved step")
                problem = say(problem, f"the second run has ended: {second.said[-300:]}" if second.is_over else "")
                second.send(signal.SIGTERM, [second.processes[0].pid])
                second.wait()
                facts = {"codes": codes, "said": first.said.strip().splitlines()[-1]}
    except Late as error:
        return Event(kind="takeover", what=what, problem=str(error))
    return Event(kind="takeover", what=what, problem=say(problem, find_all_damage(run)), facts=facts)


def _compare_bits(kind: str, run: Path, straight: Path) -> Event:
    num_steps = count_steps(run) + 3
    how = {"num_ranks": 1, "apart": True}
    problem = say(finish(run, num_steps, *OPTIONS, **how), run_straight(straight, num_steps, *OPTIONS, **how))
    return Event(kind=kind, what="bits", count=0, problem=problem or compare(run, straight), facts={"steps": num_steps})


OFFSETS_S = {"a day": 86400.0, "an hour": 3600.0, "a minute": 60.0}
SPARE_S = 10.0
"""Seconds by which a wait may be longer than it has to be, since the machine does other things too."""


def provoke_clocks(folder: Path, amounts: Amounts, done: Sequence[Event]) -> Iterator[Event]:
    """Leases of another machine, silent ones and ones that beat, whose dates are wrong both ways; all at once."""
    known = {event.what for event in done}
    cases = [
        (f"{name} {'ahead' if sign > 0 else 'behind'}, {'beating' if beats else 'silent'}", sign * offset_s, beats)
        for name, offset_s in OFFSETS_S.items()
        for sign in (1, -1)
        for beats in (True, False)
    ]
    cases = [case for case in cases if case[0] not in known]
    with ThreadPoolExecutor(max(1, len(cases))) as pool:
        yield from pool.map(lambda case: meet_lease(folder / case[0].replace(" ", "-"), *case), cases)


def meet_lease(folder: Path, what: str, offset_s: float, beats: bool) -> Event:
    """Start in a folder whose lease another machine has, by a clock that is off by so much."""
    folder.mkdir(parents=True, exist_ok=True)
    path, is_over = folder / lease.LEASE_NAME, threading.Event()
    holder = replace(lease.Owner.here(), host="node7", machine="another boot")
    path.write_text(json.dumps(asdict(holder)))

    def touch() -> None:
        while True:
            moment = time.time() + offset_s
            os.utime(path, (moment, moment))
            if not beats or is_over.wait(lease.HEARTBEAT_S):
                break

    heart = threading.Thread(target=touch, daemon=True)
    heart.start()
    time.sleep(0.5)
    began, is_refused = time.monotonic(), False
    try:
        with lease.hold(folder):
            waited_s = time.monotonic() - began
    except InvalidConfig:
        is_refused, waited_s = True, time.monotonic() - began
    is_over.set()
    heart.join()
    longest_s = 2 * lease.HEARTBEAT_S if beats else lease.EXPIRES_S + lease.HEARTBEAT_S + lease.SETTLE_S
    problem = say(
        "" if is_refused == beats else "a live run was robbed" if beats else "nobody's lease was refused",
        "" if waited_s < longest_s + SPARE_S else f"waited for {waited_s:.0f} s, {longest_s:.0f} s are promised",
    )
    return Event(kind="clocks", what=what, problem=problem, facts={"waited_s": round(waited_s, 1)})


KINDS = (
    Kind(
        name="stolen lease",
        title=f"a second torchrun in the folder of a live run, with its --rdzv-id and --max-restarts {RESTARTS}",
        promise="the second one is refused and ends, the first one trains on, and its bits are those of a run alone",
        provoke=provoke_theft,
        expected=lambda amounts: RESTARTS + 1,
    ),
    Kind(
        name="takeover",
        title="SIGSTOP of a run in its save, a takeover as from another machine, SIGCONT while the other one saves",
        promise="the first one ends and publishes nothing, no checkpoint is damaged, bits are those of a run alone",
        provoke=provoke_takeovers,
        expected=lambda amounts: 2 * len(MOMENTS),
    ),
    Kind(
        name="clocks",
        title="a lease of another machine by a clock that is a minute, an hour or a day ahead or behind",
        promise="one that beats is never taken over, one that is silent is, two minutes and a beat later at most",
        provoke=provoke_clocks,
        expected=lambda amounts: 4 * len(OFFSETS_S),
    ),
)
