"""Breaks planted into the order of a save: does a test notice each of them?"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.faults.events import Amounts, Event, Kind
from benchmarks.faults.planted import BREAKS
from benchmarks.faults.runs import LIMIT_S

TESTS = "tests/checkpoint/test_atomic.py"


def provoke(folder: Path, amounts: Amounts, done: Sequence[Event]) -> Iterator[Event]:
    """The tests as they are, then with each break."""
    known = {event.what for event in done}
    for what in ("", *BREAKS):
        if (what or "no break") in known:
            continue
        failed, said = run_tests(what)
        if what:
            yield Event(kind="breaks", what=what, problem="" if failed else "no test fails", facts={"failed": failed})
        else:
            yield Event(kind="breaks", what="no break", count=0, problem=said)


def run_tests(what: str) -> tuple[list[str], str]:
    """The tests that fail, and what pytest says if not all passed; RuntimeError if it ran none of them."""
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.faults.planted", "--show-capture=no", TESTS]
    environment = {**os.environ, "FAULT_BREAK": what, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    failed = re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1):
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}"
        )
    return failed, done.stdout[-300:] if done.returncode else ""


KIND = Kind(
    name="breaks",
    title="the order of a save broken on purpose",
    promise=f"a test of {TESTS} fails",
    provoke=provoke,
    expected=lambda amounts: len(BREAKS),
)
