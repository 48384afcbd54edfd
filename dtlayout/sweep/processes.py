"""Run a command to its end, and end all of its processes, also those in sessions of their own.

Every process carries a mark in its environment, by which it is found again: torchrun starts workers in other process
groups, and a sweep that goes on after it was killed has no handle on the processes that it had started.

The module `dtlayout.sweep.processes PARENT COMMAND [ARGUMENT …]` becomes a command that does not outlive its parent. A
sweep that is killed with SIGKILL cannot end its trial, so Linux does, with SIGTERM, which torchrun hands on to workers.
"""

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
from dtlayout.base.parent import end_with_parent

_MARK = "DTLAYOUT_TRIAL"
_LOOK_EVERY_S = 0.1
_GONE_WITHIN_S = 30.0
"""Seconds for which processes that got SIGKILL are waited for."""


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
    """The exit code of a command; None if it was ended, after the time limit or since `is_stopped` said so.

    `environment` is added to that of this process. No process of the command is left when this returns or raises. If
    this process is killed, Linux sends SIGTERM to the command.
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
    command: Sequence[str],
    output: IO[bytes] | IO[str],
    mark: str,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[bytes]:
    """Start a command whose output goes to a file; it ends with this process."""
    return subprocess.Popen(
        run_module("dtlayout.sweep.processes", str(os.getpid()), *command),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment, _MARK: mark, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # Ctrl-C goes to this process, which ends the command itself
    )


def find(mark: str) -> list[int]:
    """Ids of the processes with this mark; none where there is no /proc."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's process, or one that is gone
            if wanted in (folder / "environ").read_bytes().split(b"\0") and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found


def end(mark: str, process: subprocess.Popen[bytes] | None = None, *, grace_s: float = 10.0) -> None:
    """End every process with this mark: SIGTERM to all, SIGKILL to those that still live `grace_s` later."""
    found = find(mark)
    _signal(found, signal.SIGTERM)
    if process is not None and process.pid not in found:  # a second signal would cut short its end
        process.terminate()
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and (find(mark) or (process is not None and process.poll() is None)):
        time.sleep(_LOOK_EVERY_S)
    if process is not None and process.poll() is None:
        process.kill()
    killed = set()
    while found := find(mark):  # a process that was started meanwhile is found in the next round
        _signal(found, signal.SIGKILL)
        killed.update(found)
        time.sleep(_LOOK_EVERY_S)
    if process is not None:
        process.wait()
    deadline = time.monotonic() + _GONE_WITHIN_S  # a GPU's memory is free only when its process is gone
    while time.monotonic() < deadline and any(map(_is_alive, killed)):
        time.sleep(_LOOK_EVERY_S)


def _is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _become(parent: int, command: list[str]) -> None:
    """Become the command, which ends when the process `parent` ends; on other systems than Linux it does not."""
    end_with_parent(parent)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
