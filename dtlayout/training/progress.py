"""What each rank of a node is doing, in memory that they share, so that it outlives whoever dies.

Only its own rank writes a record; the others read it when something is wrong.
"""

import fcntl
import mmap
import os
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtlayout.base.process import is_gone, is_stopped

_FORM = struct.Struct("<qqqd?10s80s160s64s")
"""Rank, process, step, since when it does what it does or has ended, whether that is to wait for others, how it ended,
what it does, why it ended, and with whom it lost a connection."""
_HEAD = struct.Struct("<q")
"""1 + the rank that was found to be at fault; 0 until then."""
_SIZE = 512
assert _FORM.size <= _SIZE


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """What one rank did when somebody looked."""

    rank: int
    step: int
    """The step that it was in, from 1; 0 before the first."""
    doing: str
    age_s: float
    """For how long it had been doing that."""
    state: str
    """How it said that it ends, or `running`, `stopped` by a signal, or `gone`: ended without a word."""
    reason: str = ""
    """Why it ends."""
    waits: bool = False
    """Whether what it does is to wait for other ranks."""
    peer: str = ""
    """Address of the host with which it lost a connection, where that is known."""

    @property
    def where(self) -> str:
        """As people read it."""
        return f"step {self.step}, {self.doing}" if self.step else self.doing


class SharedStatus:
    """The records of a node's ranks."""

    def __init__(self, path: Path, num_ranks: int, *, local_rank: int, rank: int):
        """`path` is a file that all ranks of the node open; it is made if it is not there."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = _SIZE * (1 + num_ranks)
        os.ftruncate(self._file, size)
        self._memory = mmap.mmap(self._file, size)
        self._num_ranks = num_ranks
        self._own = _SIZE * (1 + local_rank)
        self.rank = rank
        self.since = 0.0
        """When this rank began what it does."""
        self.step = 0
        self.write("starting")

    def write(self, doing: str, *, waits: bool = False) -> None:
        """Note what this rank does from now on, and whether that is to wait for others."""
        self.since = time.monotonic()
        self._doing, self._waits = doing.encode()[:80], waits
        self._write(os.getpid())

    def fail(self, state: str, reason: str, peer: str = "") -> None:
        """Note how this rank ends, why, and with whom it lost a connection; what it did stays."""
        self.since = time.monotonic()
        self._write(os.getpid(), state, reason, peer)

    def leave(self) -> None:
        """Note that this rank ends well: nobody misses it."""
        self._write(0)

    def _write(self, pid: int, state: str = "", reason: str = "", peer: str = "") -> None:
        how = self.since, self._waits, state.encode()
        values = self.rank, pid, self.step, *how, self._doing, reason.encode()[:160], peer.encode()[:64]
        # In one go: `pack_into` would empty the record first, and who is killed then would be missed by nobody.
        self._memory[self._own : self._own + _FORM.size] = _FORM.pack(*values)

    def read(self) -> list[RankProgress]:
        """The records of all ranks of the node that have begun and have not ended well."""
        now, records = time.monotonic(), []
        for rank, pid, step, since, waits, state, doing, reason, peer in self._unpack():
            found = _text(state) or ("gone" if is_gone(pid) else "stopped" if is_stopped(pid) else "running")
            values = {"rank": rank, "step": step, "doing": _text(doing), "state": found, "reason": _text(reason)}
            records.append(RankProgress(**values, waits=waits, age_s=now - since, peer=_text(peer)))
        return records

    def find_process(self, rank: int) -> int | None:
        """The process of a rank of this node; None of another's, or one that has ended well."""
        return next((pid for found, pid, *_ in self._unpack() if found == rank), None)

    def _unpack(self) -> list[tuple[Any, ...]]:
        found = [_FORM.unpack_from(self._memory, _SIZE * (1 + i)) for i in range(self._num_ranks)]
        return [values for values in found if values[1]]

    def claim(self) -> bool:
        """Whether this is the rank that speaks for its node: the first one that asks, for as long as it lives."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    @property
    def culprit(self) -> int | None:
        """The rank that was found to be at fault; None as long as nobody was."""
        found: int = _HEAD.unpack_from(self._memory)[0]
        return found - 1 if found else None

    @culprit.setter
    def culprit(self, rank: int) -> None:
        _HEAD.pack_into(self._memory, 0, rank + 1)


def new_path() -> Path:
    """Where a board may be, in memory where there is such a folder."""
    shared = Path("/dev/shm")
    handle, name = tempfile.mkstemp(prefix="dtlayout-", dir=shared if os.access(shared, os.W_OK) else None)
    os.close(handle)
    return Path(name)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
