"""Processes of this machine, as /proc tells of them, where there is one; what this one is called, and how it ends."""

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
"""Dead, and not yet waited for."""

RENAMING = threading.RLock()
"""Held by a thread between two renames that belong together; whoever ends this process from another thread waits."""


def is_gone(pid: int) -> bool:
    """Whether a process has ended, as far as can be seen."""
    if HAS_PROC:
        try:
            return not _read(pid)
        except OSError:  # this process may have too many files open
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's, so there is one
        pass
    return False


def is_stopped(pid: int) -> bool:
    """Whether a process is held by a signal or a debugger, and may go on later."""
    with suppress(OSError):
        return _read(pid)[:1] in (["T"], ["t"])
    return False


def find_birth(pid: int) -> str:
    """When a process began, in ticks since boot; empty of one that is gone, or of which nothing is known."""
    return (_read(pid) or [""] * 20)[19]


def lives(pid: int, birth: str) -> bool | None:
    """Whether the process that began then is there; None if this user may not see it, or nothing is known of it."""
    if not birth:
        return None
    if found := find_birth(pid):
        return found == birth
    try:
        os.kill(pid, 0)
    except PermissionError:  # somebody else's, in a /proc that hides it
        return None
    except (ProcessLookupError, OverflowError):
        pass
    return False


def name_process() -> str:
    """This process's name, which no other one has, on whatever host: for files and folders that it alone writes."""
    return _name(os.getpid())


@cache
def _name(pid: int) -> str:
    return f"{socket.gethostname()}.{pid}.{os.urandom(4).hex()}"


def leave(exit_code: int) -> NoReturn:
    """End this process with this code, after what asked to be called at its end, and all that it has printed.

    [Note: ends of processes]
    torch's collectives leave threads in C++. Where Python takes its interpreter down below them, one of some 45
    processes dies of SIGABRT, after all its work is done. So what Python does at an end is done here (threads that are
    no daemons are waited for, `atexit` is called, streams are flushed), and the interpreter is left as it is.
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
    """The fields of a process from its state on; none of one that is gone. OSError if nobody can tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [] if fields[0] in _GONE else fields
