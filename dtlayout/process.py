"""Other processes of this machine, as /proc tells of them; where there is none, nothing is known."""

import os
from contextlib import suppress
from pathlib import Path

HAS_PROC = Path("/proc/self/stat").exists()
_GONE = "ZX"
"""Dead, and not yet waited for."""


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


def _read(pid: int) -> list[str]:
    """The fields of a process from its state on; none of one that is gone. OSError if nobody can tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [] if fields[0] in _GONE else fields
