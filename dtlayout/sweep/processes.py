"""Run a command to its end, and end all of its processes, also those that hide in sessions of their own.

Every process carries a mark in its environment, by which it is found again: torchrun starts workers in other process
groups, and a sweep that went on after it was killed has no handle on what it had started.

The module `dtlayout.sweep.processes PARENT COMMAND [ARGUMENT …]` becomes a command that does not outlive its parent: a
sweep that is killed with SIGKILL cannot end its trial, so Linux does, with SIGTERM, which torchrun hands on to workers.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO

from dtlayout.base.interpreter import run_module

_MARK = "DTLAYOUT_TRIAL"
_PR_SET_PDEATHSIG = 1
_LOOK_EVERY_S = 0.1
_GONE_WITHIN_S = 30.0
"""Seconds after which no process that SIGKILL ended is waited for any longer."""


def run(
    command: Sequence[str],
    output: IO[bytes] | IO[str],
    mark: str,
    *,
    timeout_s: float,
    grace_s: float = 10.0,
    is_stopped: Callable[[], bool] = lambda: False,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> int | None:
    """The exit code of a command; None if it was ended, since the time had passed or `is_stopped` said so.

    `environment` is what it has more than this process. Nothing of it is left when this returns or raises. If this
    process is killed, Linux sends SIGTERM to the command.
    """
    deadline = time.monotonic() + timeout_s
    process = start(command, output, mark, environment)
    try:
        while (exit_code := process.poll()) is None and time.monotonic() < deadline and not is_stopped():
            time.sleep(_LOOK_EVERY_S)
        return exit_code
    finally:
        end(mark, process, grace_s=grace_s)


def start(
    command: Sequence[str], output: IO[bytes] | IO[str], mark: str,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a command whose output goes to a file; it ends with this process."""
    return subprocess.Popen(
        run_module("dtlayout.sweep.processes", str(os.getpid()), *command),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment, _MARK: mark, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # Ctrl-C is this process's, which ends the command itself
    )


def find(mark: str) -> list[int]:
    """Process ids with this mark; none where there is no /proc."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # somebody else's, or gone
            if wanted in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found


def end(mark: str, process: subprocess.Popen[bytes] | None = None, *, grace_s: float = 10.0) -> None:
    """End every process with this mark: SIGTERM to all, SIGKILL to those that are there `grace_s` later."""
    found = find(mark)
    _signal(found, signal.SIGTERM)
    if process is not None and process.pid not in found:  # a second signal would cut short what the first began
        process.terminate()
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and (find(mark) or (process is not None and process.poll() is None)):
        time.sleep(_LOOK_EVERY_S)
    if process is not None and process.poll() is None:
        process.kill()
    killed = set()
    while found := find(mark):  # one that was started meanwhile is found in the next round
        _signal(found, signal.SIGKILL)
        killed.update(found)
        time.sleep(_LOOK_EVERY_S)
    if process is not None:
        process.wait()
    deadline = time.monotonic() + _GONE_WITHIN_S  # a GPU's memory is free only when its process is gone
    while time.monotonic() < deadline and any(map(_is_alive, killed)):
        time.sleep(_LOOK_EVERY_S)


def _is_alive(pid: int) -> bool:
    """Whether a process is there and more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _become(parent: int, command: list[str]) -> None:
    """Become the command, as long as the process `parent` lives; elsewhere than on Linux untethered."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the signal was asked for
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
