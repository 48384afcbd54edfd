"""Faults that a run has to survive, provoked one after another, and a page of what came of each.

    make bench NAME=faults            an hour of nothing else; again, it goes on where it broke off
    python -m benchmarks.faults [--quick] [--only KIND[,KIND]] [--out FOLDER] [--page FILE]

events.py says what is noted, runs.py starts and compares small runs of train.py, and each other file is a kind of
fault. Exit code 1 if one was not survived, or there were fewer than there should be. What the page had of kinds of
which there are no events stays on it (`page`).
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.faults import breaks, flips, full_disk, kills, layouts, leases, limits, signals, writes
from benchmarks.faults.events import Amounts, Event, EventsFile, Kind
from benchmarks.faults.page import HEAD, Page
from benchmarks.pages.markdown import made_by, table

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        *(each.KIND for each in (breaks, layouts, flips, writes, full_disk, signals, kills)),
        *leases.KINDS,
        limits.KIND,
    )
}
FULL = Amounts(kills=50, inside=20, signals=10, pairs=30)
QUICK = Amounts(kills=4, inside=2, signals=1, pairs=4)


def main(arguments: Sequence[str]) -> int:
    """Provoke what is not in the events yet, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults")
    parser.add_argument("--quick", action="store_true", help="some of each kind, to see that all of this runs")
    parser.add_argument("--only", metavar="KIND", default=",".join(KINDS), help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--out", type=Path, default=Path("runs/faults"), help="folder of the runs and of events.jsonl")
    parser.add_argument("--page", type=Path, help="where the page goes; otherwise it is printed")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    amounts, file = QUICK if options.quick else FULL, EventsFile(options.out / "events.jsonl")
    kinds = [KINDS[name] for name in options.only.split(",")]
    for kind in kinds:
        done = [event for event in file.read() if event.kind == kind.name]
        for event in kind.provoke(options.out.absolute() / kind.name.replace(" ", "_"), amounts, done):
            file.append(event)
            outcome = event.problem or "survived"
            print(f"{kind.name}: {event.what} {event.facts or ''}: {outcome}", file=sys.stderr, flush=True)
    events = file.read()
    page = "\n".join(report(amounts, events, Page.read(options.page))) + "\n"
    if options.page:
        options.page.write_text(page, encoding="utf-8")
    else:
        print(page)
    return 0 if all(is_survived(kind, amounts, events) for kind in kinds) else 1


def is_survived(kind: Kind, amounts: Amounts, events: Sequence[Event]) -> bool:
    """Whether there were enough faults of a kind, and none had a problem."""
    own = latest(kind, events)
    enough = sum(event.count for event in own) >= kind.expected(amounts)
    inside = kind.name != "kills" or count_moments(own)["save"] >= amounts.inside
    return enough and inside and not any(event.problem for event in own)


def latest(kind: Kind, events: Sequence[Event]) -> list[Event]:
    """The events of a kind; a comparison counts as it came out last."""
    return list({event.what: event for event in events if event.kind == kind.name}.values())


def report(amounts: Amounts, events: Sequence[Event], before: Page) -> list[str]:
    """The page's lines; what no event tells of is as it was `before`."""
    by_kind = {kind.name: latest(kind, events) for kind in KINDS.values()}
    today = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    lines = [
        "# Faults, and what was left of runs after them\n",
        f"{made_by('faults')}, small models on gloo.",
        "Survived is what kept the promise beside it; bits are all losses of a run and hashes of its last checkpoint's",
        "tensors.\n",
        HEAD,
        "|---|--:|--:|--:|---|---|",
    ]
    for kind in KINDS.values():
        own = by_kind[kind.name]
        if not own:
            lines += [before.rows[kind.title]] if kind.title in before.rows else []
            continue
        provoked = sum(event.count for event in own)
        survived = sum(event.count for event in own if not event.problem) if is_compared(own) else 0
        cells = kind.title, provoked, kind.expected(amounts), survived, kind.promise, today
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for name, describe in DETAILS.items():
        if by_kind[name]:
            lines += ["", *describe(by_kind[name])]
        else:
            lines += ["", *kept] if (kept := before.sections.get(f"## {HEADINGS[name]}")) else []
    problems = [event for own in by_kind.values() for event in own if event.problem]
    if problems:
        lines += ["", "## Not survived\n", *(f"- {each.kind}, {each.what}: {each.problem}" for each in problems)]
    return lines


def is_compared(own: Sequence[Event]) -> bool:
    """Whether the comparisons after the faults of a kind came out right: if not, none of these was survived."""
    return not any(event.problem for event in own if event.count == 0)


def count_moments(own: Sequence[Event]) -> Counter[str]:
    """Kills by when they came."""
    return Counter(event.facts["moment"] for event in own if event.count)


def describe_kills(own: Sequence[Event]) -> list[str]:
    """When kills came."""
    moments = count_moments(own)
    steps = next((event.facts["steps"] for event in own if event.what == "bits"), 0)
    return [
        "## Kills\n",
        f"Of {moments.total()} kills {moments['start']} came before the first step of a start, {moments['steps']} in",
        f"later steps, and {moments['save']} left a save unfinished; the run had {steps} steps. The first {FULL.kills}",
        "came at moments uniform over twice the time that a start takes to its first step; those after them were aimed",
        "at a save, uniform over its length.",
    ]


def describe_signals(own: Sequence[Event]) -> list[str]:
    """Signals by phase."""
    phases = dict.fromkeys(event.facts["phase"] for event in own if event.count)
    lines = [
        "## Signals\n",
        "Two ranks as tp2, without torchrun, whose exit codes are seen so. Half of the signals go to one of them",
        "alone, but those of the start. The time is from the signal to the end of the last rank;",
        f"{signals.GRACE_S:.0f} s is what torchrun gives. A compilation is waited for, and --shutdown-timeout gives it",
        "time.\n",
        "| phase | SIGTERM | SIGINT | SIGUSR1 | exit codes | longest, s |",
        "|---|--:|--:|--:|---|--:|",
    ]
    for phase in phases:
        events = [event for event in own if event.count and event.facts["phase"] == phase]
        right = Counter(event.facts["signal"] for event in events if not event.problem)
        total = Counter(event.facts["signal"] for event in events)
        cells = " | ".join(f"{right[name]} of {total[name]}" for name in ("SIGTERM", "SIGINT", "SIGUSR1"))
        codes = Counter(code for event in events for code in event.facts["codes"])
        listed = ", ".join(f"{code} ({count} ranks)" for code, count in codes.most_common())
        lines.append(f"| {phase} | {cells} | {listed} | {max(event.facts['seconds'] for event in events):.1f} |")
    return lines


def describe_breaks(own: Sequence[Event]) -> list[str]:
    """A table of the planted faults and the tests that notice them."""
    rows = [[event.what, ", ".join(f"`{name}`" for name in event.facts["failed"])] for event in own if event.count]
    return ["## Planted breaks\n", *table(["break", "tests that fail"], rows, num_words=2)]


def describe_clocks(own: Sequence[Event]) -> list[str]:
    """For how long each lease was looked at."""
    rows = [[event.what, f"{event.facts['waited_s']:.0f}"] for event in own]
    return ["## Clocks\n", *table(["the lease's clock", "until it was refused or taken over, s"], rows)]


DETAILS = {"kills": describe_kills, "signals": describe_signals, "breaks": describe_breaks, "clocks": describe_clocks}
HEADINGS = {"kills": "Kills", "signals": "Signals", "breaks": "Planted breaks", "clocks": "Clocks"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
