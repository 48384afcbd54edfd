"""Real runs that lose ranks: the line that names one, the end of the others, and torchrun's restarts."""

import re
from pathlib import Path

import pytest
from launching import finish, launch, losses, read_lines, read_summary, started
from tiny import ROOT, write_tiny

FAULTS = """
import os, signal, time
from dtlayout.training.watchdog import Watchdog

begin, faults = Watchdog.begin_step, os.environ["FAULTS"].split()

def begin_step(watch, step):
    begin(watch, step)
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if start < len(faults) and step == 3 + 2 * start and int(os.environ["RANK"]) == start % 2:
        match faults[start]:
            case "raise":
                raise ValueError("planted")
            case "sleep":
                time.sleep(1000)
            case name if name.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, name))

at = Watchdog.at

def at_any_time(watch, doing, **options):
    at(watch, doing, **options)
    if doing == "loading a checkpoint" and faults[-1] == "load" and int(os.environ["RANK"]) == 1:
        if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == len(faults) - 1:
            os.kill(os.getpid(), signal.SIGKILL)

Watchdog.begin_step, Watchdog.at = begin_step, at_any_time
"""
"""A plugin: each start of a run loses a rank of two in another way, two steps later than the one before.

The last one may while it loads: then the others find what they read unreadable, which it is not.
"""


ABORTS = """
import os, sys

class Aborts:
    def __del__(self, abort=os.abort):
        abort()

if "RANK" in os.environ:
    sys.aborts = Aborts()
"""
"""A sitecustomize: a rank whose interpreter is taken down dies of SIGABRT, as some do of collectives' threads."""


def read(path: Path) -> str:
    """A command line; empty of a process that has just ended."""
    try:
        return path.read_text()
    except OSError:
        return ""


def plant(folder: Path, *faults: str) -> dict[str, str]:
    """The environment in which ranks have these faults, a start each, and no interpreter that ends in Python's way."""
    (folder / "faults.py").write_text(FAULTS)
    (folder / "sitecustomize.py").write_text(ABORTS)
    return {"DTLAYOUT_PLUGINS": "faults", "PYTHONPATH": f"{ROOT}:{folder}", "FAULTS": " ".join(faults)}


def test_each_loss_is_named_in_one_line_and_torchrun_goes_on_from_the_last_checkpoint(tmp_path):
    files, log = write_tiny(tmp_path, steps=10), tmp_path / "log"
    environment = plant(tmp_path, "raise", "SIGKILL", "SIGSTOP", "load")
    options = ("--layout.tp=2", "--checkpoint.every=1", "--train.timeout_s=20")
    with started(2, files.config, *options, log=log, max_restarts=4, **environment) as process:
        assert finish(process, log) == 0, log.read_text()
    text = log.read_text()
    said = re.findall(r"^rank (\d) on \S+ (.*)$", text, re.MULTILINE)
    patterns = [
        r"failed in step 3, beginning: ValueError: planted",
        r"is gone: its process ended without a word, killed perhaps; it was in step 5, beginning",
        r"is stopped by a signal, for \d+ s, in step 7, beginning",
        r"is gone: its process ended without a word, killed perhaps; it was in loading a checkpoint",
    ]
    assert [int(rank) for rank, _ in said] == [0, 1, 0, 1], text
    for (_, line), pattern in zip(said, patterns, strict=True):
        assert re.fullmatch(pattern, line)
    assert len(re.findall(r"^ValueError: planted$", text, re.MULTILINE)) == 1  # its traceback, and nobody else's
    assert text.count("Traceback") == 1
    resumed = [int(step) for step in re.findall(r"resumed from \S+ after (\d+) steps?", text)]
    for number, steps in enumerate(resumed, 1):  # all but the steps since the last save, which may be under way
        assert 2 * number - 1 <= steps <= 2 * number
    assert len(resumed) == 3
    summary = read_summary(files.run)
    assert (summary["outcome"], summary["steps"], summary["problems"]) == ("done", 10, [])
    assert [line["step"] for line in read_lines(files.run)] == list(range(1, 11))
    straight = tmp_path / "straight"
    assert launch(1, files.config, f"--train.run_folder={straight}", log=log) == 0
    assert losses(files.run) == pytest.approx(losses(straight), rel=1e-4)


def test_a_run_that_stands_still_ends_and_its_summary_says_why(tmp_path):
    files, log = write_tiny(tmp_path, steps=10, num_layers=2), tmp_path / "log"
    options = ("--layout.pp=2", "--checkpoint.every=1", "--train.timeout_s=20")
    with started(2, files.config, *options, log=log, **plant(tmp_path, "sleep")) as process:
        assert finish(process, log) != 0
    summary = read_summary(files.run)
    assert (summary["outcome"], summary["exit_code"]) == ("crashed", None)
    assert summary["steps"] in (1, 2)  # the second may still have been written
    (line,) = summary["problems"]
    found = re.fullmatch(r"rank 0 on \S+ stood still first, for (\d+) s, in step 3, beginning", line)
    assert found and 20 <= int(found[1]) < 20 + 30, line
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(files.config) in read(path)]
