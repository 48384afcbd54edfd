"""The lease of a run folder: RUN/running.json says which process writes there, so that a second run is refused.

The file is made before anything else is written and removed at the end. In between a thread touches it every few
seconds, which is its heartbeat. Nothing is locked, since file locks fail or hang on some shared filesystems.

[Note: leases that nobody holds]
A crash leaves the file behind. A process of this machine can be seen: if it lives, the folder is its own, whatever a
launcher says; if it is gone, the file is taken over at once. Of another machine only heartbeats can be seen. Without a
heartbeat for `EXPIRES_S` the file is taken over too. A later start of the same run, as torchrun and Slurm number them,
waits only for `LOOKED_S`. The age of the last heartbeat is measured against a file that is written beside it, so that
only the filesystem's clock counts. If that clock was set, the wait can become shorter, but never longer, and never
shorter than `LOOKED_S`, which this process measures itself.

[Note: writers that come back]
A process that was silent may only have stood still, and go on later. So it looks at its lease before it publishes or
removes anything, and before each line of its metrics if its last heartbeat is old. Between such a look and the next
action it may have stood still too. Two rules help. After taking over, a process waits for one heartbeat: in that time
an old process that goes on finds out. And unfinished files carry their writer's name (`checkpoint.folder`), so nobody
can publish a file that another process writes.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from dtlayout.base import toml
from dtlayout.base.errors import EXIT_REFUSED, DtlayoutError, InvalidConfig
from dtlayout.base.files import parse_json
from dtlayout.base.process import RENAMING, find_birth, lives, name_process
from dtlayout.base.restarts import refuse_restarts

LEASE_NAME = "running.json"
HEARTBEAT_S = 10.0
EXPIRES_S = 120.0
"""Seconds of silence after which a lease may be taken over: more than the minute for which an NFS client may believe an
old state of a file."""
LOOKED_S = 3 * HEARTBEAT_S
"""Seconds for which a start looks for heartbeats at least, before it takes over another machine's lease."""
TRUSTED_S = 2 * HEARTBEAT_S
"""Seconds after a heartbeat in which nobody can have taken over."""
SETTLE_S = 1.0
"""Seconds between taking over and looking who did: if several do so at once, the last one has the lease."""

_STARTS = {"TORCHELASTIC_RUN_ID": "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID": "SLURM_RESTART_COUNT"}
"""Variable with a launcher's name for a run → variable with the number of restarts."""
_NO_NAME = ("", "none")  # torchrun's --rdzv-id where nobody gives one


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that writes a run folder: rank 0 of a run."""

    host: str
    pid: int
    began: str
    """Time at which the process began, with the zone of the host."""
    machine: str
    """Boot and process namespace, in which a pid is unique; empty where that is not known."""
    birth: str
    """Start of the process, in ticks since boot: a later process may have its pid."""
    restarts: dict[str, int]
    """Name of the run, as launchers have it → number of its restarts until then."""

    @classmethod
    def here(cls) -> "Owner":
        """The owner that this process is."""
        names = {f"{name}={os.environ.get(name, '')}": count for name, count in _STARTS.items()}
        named = {name: count for name, count in names.items() if name.partition("=")[2] not in _NO_NAME}
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            began=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
            machine=_find_machine(),
            birth=find_birth(os.getpid()),
            restarts={name: int(os.environ.get(count) or 0) for name, count in named.items()},
        )

    def lives(self, here: "Owner") -> bool | None:
        """Whether `here` sees that the process lives; None if it cannot see it, as on another machine."""
        if not self.machine or (self.machine, self.host) != (here.machine, here.host):
            return None
        return lives(self.pid, self.birth)

    def is_before(self, here: "Owner") -> bool:
        """Whether `here` is a later start of the same run, if launchers have not given two runs one name."""
        return any(here.restarts.get(name, 0) > count for name, count in self.restarts.items())

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, which began {self.began}"


class Lease:
    """A run folder that belongs to this process until it gives it back."""

    def __init__(self, folder: Path, text: str):
        """`text` is the content that this process has written into the file."""
        self.text = text
        self.before_end: Callable[[str], object] = lambda reason: None
        """Called with the reason before the process ends because another run has the folder."""
        self._folder, self._path = folder, folder / LEASE_NAME
        self._handle = os.open(folder, os.O_RDONLY)  # of the folder itself, whatever its name becomes
        self._is_over, self._looking = threading.Event(), threading.Lock()
        self._last_heartbeat_s = _now()
        self._heartbeats = threading.Thread(target=self._send_heartbeats, name="lease", daemon=True)
        self._heartbeats.start()

    def check(self, trusted_s: float = 0.0) -> None:
        """Return if the folder is still this process's; else print the reason, and end the process.

        A heartbeat of the last `trusted_s` seconds is enough. OSError if the file cannot be read.
        """
        if _now() - self._last_heartbeat_s < trusted_s:
            return
        with self._looking:
            if not self._is_over.is_set() and (reason := self._find_loss()):
                print(reason, file=sys.stderr, flush=True)
                refuse_restarts(reason)
                self.before_end(reason)
                with RENAMING:  # another run's checkpoint may just have lost its name
                    os._exit(EXIT_REFUSED)

    def release(self) -> None:
        """Give the folder back: the next run can have it at once."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        self._heartbeats.join()
        with self._looking:
            with suppress(OSError):
                if _read_text(self._path) == self.text:
                    self._path.unlink()
            os.close(self._handle)

    def _send_heartbeats(self) -> None:
        while not self._is_over.wait(HEARTBEAT_S):
            with suppress(OSError):  # a filesystem that is away for a while ends no run
                self.check()
                now_s = _now()
                os.utime(self._path)
                self._last_heartbeat_s = now_s

    def _find_loss(self) -> str:
        """Reason why this process must end; empty if there is none."""
        try:
            found = _read_text(self._path)
        except FileNotFoundError:
            if moved := self._find_move():
                return moved
            print(f"{self._path} was removed, and this run still writes here: put back", file=sys.stderr, flush=True)
            found = self.text if _create(self._path, self.text) else _read_text(self._path)
        if found in ("", self.text):  # an empty file has no owner
            return ""
        return f"{self._folder} was taken over by {_read(self._path) or 'another run'}: ended"

    def _find_move(self) -> str:
        """Message about a folder that was moved or deleted while this run wrote there; empty if it is where it was."""
        own = os.fstat(self._handle)
        with suppress(FileNotFoundError):
            there = self._folder.stat()
            if (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino):
                return ""
        if LEASE_NAME not in os.listdir(self._handle):
            return f"{self._folder} was deleted while this run wrote there: ended"
        with suppress(OSError):
            os.unlink(LEASE_NAME, dir_fd=self._handle)  # a run that goes on there needs not wait
        try:
            place = f"to {os.readlink(f'/proc/self/fd/{self._handle}')!r} "
        except OSError:
            place = ""
        return (
            f"{self._folder} was moved {place}while this run wrote there: ended; "
            f"it goes on with train.run_folder of the new place"
        )


@contextmanager
def hold(folder: Path) -> Iterator[Lease]:
    """A block in which the run folder belongs to this process. The folder is made if it does not exist.

    The start may wait, for up to some 130 s, to see whether a run on another host still lives. InvalidConfig names the
    run that has the folder; torchrun's next starts then end at once. DtlayoutError if the folder cannot be written. If
    another run takes the folder over during the block, or the folder is moved or deleted, this process prints a line
    and ends.
    """
    here = Owner.here()
    text = json.dumps(asdict(here), indent=2) + "\n"
    if folder.is_symlink() and not folder.exists():
        raise DtlayoutError(
            f"train.run_folder={str(folder)!r} is a link to {os.readlink(folder)!r}, which is not there"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _take(folder / LEASE_NAME, here, text)
        lease = Lease(folder, text)
    except OSError as error:
        raise DtlayoutError(f"train.run_folder={str(folder)!r} cannot be written: {error.strerror}") from None
    try:
        yield lease
    finally:
        lease.release()


def is_of_another(folder: Path, text: str) -> bool:
    """Whether a run folder is seen to belong to another run than the one whose lease has this text."""
    try:
        return _read_text(folder / LEASE_NAME) not in ("", text)
    except OSError:
        return False


def _take(path: Path, here: Owner, text: str) -> None:
    """Make the file, or take over one that nobody holds: [Note: leases that nobody holds]."""
    while not _create(path, text):
        try:
            found = _look(path)
            owner = _read(path)
            is_alive = owner.lives(here) if owner else None
            if is_alive:
                raise _refuse(path, owner)
            if is_alive is None:
                found = _wait_for_silence(path, owner, here)
            if _look(path) != found:  # another process has it by now
                continue
        except FileNotFoundError:  # its run has just ended
            continue
        who = f"of {owner} " if owner else ""
        print(f"{path} {who}was left by a run that is gone: taken over", file=sys.stderr, flush=True)
        own = _write_beside(path, text)
        os.replace(own, path)
        time.sleep(SETTLE_S if is_alive is False else HEARTBEAT_S + SETTLE_S)  # [Note: writers that come back]
        if _read_text(path) != text:
            raise _refuse(path, _read(path))
        return


def _write_beside(path: Path, text: str) -> Path:
    """Write a new file beside `path` that no other process writes; removed again where the disk is full."""
    own = path.with_name(f".{path.name}.{name_process()}")
    try:
        own.write_text(text, encoding="utf-8")
    except OSError:
        own.unlink(missing_ok=True)
        raise
    return own


def _create(path: Path, text: str) -> bool:
    """Make the file whole or not at all; False if it was there. Of several processes only one gets True."""
    own = _write_beside(path, text)
    try:
        os.link(own, path)
        return True
    except FileExistsError:
        return own.stat().st_nlink == 2  # NFS may have lost the answer, and asked again
    except OSError:  # a filesystem without links
        return _create_in_place(path, text)
    finally:
        own.unlink(missing_ok=True)


def _create_in_place(path: Path, text: str) -> bool:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return False
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _read(path: Path) -> Owner | None:
    """Owner of a lease; None if a kill, or another version, left a file that does not say it."""
    try:
        return toml.parse(parse_json(_read_text(path)), Owner)
    except (ValueError, InvalidConfig):
        return None


def _look(path: Path) -> tuple[int, int]:
    """Inode and modification time of the file, which change with each owner and each heartbeat."""
    with path.open("rb") as file:  # NFS asks its server when a file is opened
        found = os.fstat(file.fileno())
    return found.st_ino, found.st_mtime_ns


def _wait_for_silence(path: Path, owner: Owner | None, here: Owner) -> tuple[int, int]:
    """Wait until the lease has shown no heartbeat for `EXPIRES_S`, or for `LOOKED_S` if `here` is a later start of the
    same run; at least `LOOKED_S` here.

    The answer is that of `_look`. InvalidConfig as soon as the file changes, FileNotFoundError if it goes.
    """
    expires_s = LOOKED_S if owner and owner.is_before(here) else EXPIRES_S
    found = _look(path)
    beside = _write_beside(path, "")
    silent_s = (beside.stat().st_mtime_ns - found[1]) / 1e9
    beside.unlink()
    left_s = max(LOOKED_S, expires_s - max(0.0, silent_s))
    ends = time.monotonic() + left_s
    print(
        f"{path}: another run may still write here; looking for its heartbeat, for {left_s:.0f} s at most",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    while (left_s := ends - time.monotonic()) > 0:
        time.sleep(min(left_s, HEARTBEAT_S / 10))
        if _look(path) != found:
            raise _refuse(path, _read(path) or owner)
    return found


def _refuse(path: Path, owner: Owner | None) -> InvalidConfig:
    """The refusal; torchrun's further starts of this run will end at once."""
    who = str(owner) if owner else f"a process that {path} does not name"
    refusal = (
        f"train.run_folder={str(path.parent)!r} belongs to another run: {who}; use another folder, or end that run"
    )
    refuse_restarts(refusal)
    return InvalidConfig(refusal)


def _now() -> float:
    """Seconds since some moment, including the time in which the machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _find_machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
