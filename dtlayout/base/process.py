"""Processes of this machine, as /proc describes them where it exists; a name and an end for this process."""

import atexit
import os
import socket
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NoReturn

HAS_PROC = Path("/proc/self/stat").exists()
_GONE = "ZX"
"""States of processes that are dead, but not yet waited for."""

RENAMING = threading.RLock()
"""Lock of a thread between two renames that belong together; a thread that ends this process waits for it."""


def is_gone(pid: int) -> bool:
    """Whether a process has ended; False if that cannot be seen."""
    if HAS_PROC:
        try:
            return not _read(pid)
        except OSError:  # this process may have too many files open
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's process, so there is one
        pass
    return False


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger, and may go on later."""
    with suppress(OSError):
        return _read(pid)[:1] in (["T"], ["t"])
    return False


def find_birth(pid: int) -> str:
    """Start of a process, in ticks since boot; empty if it is gone or cannot be seen."""
    return (_read(pid) or [""] * 20)[19]


def lives(pid: int, birth: str) -> bool | None:
    """Whether the process with this start is still there; None if this user may not see it, or `birth` is empty."""
    if not birth:
        return None
    if found := find_birth(pid):
        return found == birth
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's process, in a /proc that hides it
        return None
    except (ProcessLookupError, OverflowError):
        pass
    return False


def name_process() -> str:
    """Name of this process, unique on all hosts; for files and folders that only it writes."""
    return _name(os.getpid())


@cache
def _name(pid: int) -> str:
    return f"{socket.gethostname()}.{pid}.{os.urandom(4).hex()}"


def leave(exit_code: int) -> NoReturn:
    """End this process with this code, after its exit handlers ran and its output was written.

    [Note: ends of processes]
    torch's collectives leave threads in C++. Where Python takes its interpreter down below them, one of some 45
    processes dies of SIGABRT, after all its work is done. So this function does Python's work at an end (wait for
    threads that are no daemons, call `atexit`, flush streams), and leaves the interpreter as it is.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # nobody reads it, it is closed, or there is none
                stream.flush()
    finally:
        os._exit(exit_code)


def _read(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; none for a process that is gone. OSError if it cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [] if fields[0] in _GONE else fields
