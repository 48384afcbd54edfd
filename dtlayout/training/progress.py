"""Progress of the ranks of a node, in memory that they share, so that it is still there when a rank has died.

Each rank writes its own record; the other ranks read it when something is wrong.
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
"""Fields of a record: rank, process, step, time since when it does what it does or has ended, whether it only waits for
others, how it ended, what it does, why it ended, and the address with which it lost a connection."""
_HEAD = struct.Struct("<q")
"""Field before all records: 1 + the rank that was found to be at fault, or 0."""
_SIZE = 512
assert _FORM.size <= _SIZE


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """One rank at the moment when its record was read."""

    rank: int
    step: int
    """Number of the step that the rank was in, from 1; 0 before the first."""
    doing: str
    """Part of the step that the rank was at, such as an action or a wait."""
    age_s: float
    """Seconds since it began that."""
    state: str
    """The end that the rank itself noted, or `running`, `stopped` by a signal, or `gone`: ended without a note."""
    reason: str = ""
    """Reason of its end; empty while it runs."""
    waits: bool = False
    """Whether it only waits for other ranks."""
    peer: str = ""
    """Address of the host with which it lost a connection; empty if unknown."""

    @property
    def where(self) -> str:
        """Step and part of the step, as text."""
        return f"step {self.step}, {self.doing}" if self.step else self.doing


class SharedStatus:
    """The records of all ranks of a node; this rank writes its own one."""

    def __init__(self, path: Path, num_ranks: int, *, local_rank: int, rank: int):
        """Open the file `path`, which all ranks of the node share; it is made if it is missing."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = _SIZE * (1 + num_ranks)
        os.ftruncate(self._file, size)
        self._memory = mmap.mmap(self._file, size)
        self._num_ranks = num_ranks
        self._own = _SIZE * (1 + local_rank)
        self.rank = rank
        self.since = 0.0
        """Time of the monotonic clock at which this rank began what it does, seconds."""
        self.step = 0
        self.write("starting")

    def write(self, doing: str, *, waits: bool = False) -> None:
        """Note what this rank does from now on, and whether it only waits for others."""
        self.since = time.monotonic()
        self._doing, self._waits = doing.encode()[:80], waits
        self._write(os.getpid())

    def fail(self, state: str, reason: str, peer: str = "") -> None:
        """Note how and why this rank ends, and the address of a lost connection; what it did stays noted."""
        self.since = time.monotonic()
        self._write(os.getpid(), state, reason, peer)

    def leave(self) -> None:
        """Note that this rank ends well: its record is read no more."""
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
        """The process of a rank of this node; None for another node's rank and one that has ended well."""
        return next((pid for found, pid, *_ in self._unpack() if found == rank), None)

    def _unpack(self) -> list[tuple[Any, ...]]:
        found = [_FORM.unpack_from(self._memory, _SIZE * (1 + i)) for i in range(self._num_ranks)]
        return [values for values in found if values[1]]

    def claim(self) -> bool:
        """Whether this rank speaks for its node: the first rank that asks does, for as long as it lives."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    @property
    def culprit(self) -> int | None:
        """The rank that was found to be at fault; None as long as none was."""
        found: int = _HEAD.unpack_from(self._memory)[0]
        return found - 1 if found else None

    @culprit.setter
    def culprit(self, rank: int) -> None:
        _HEAD.pack_into(self._memory, 0, rank + 1)


def new_path() -> Path:
    """A new file for a `SharedStatus`: in memory, if this host has a folder there."""
    shared = Path("/dev/shm")
    handle, name = tempfile.mkstemp(prefix="dtlayout-", dir=shared if os.access(shared, os.W_OK) else None)
    os.close(handle)
    return Path(name)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
