"""The lease of a run folder: RUN/running.json says which process writes there, so that a second run is refused.

The file is made before anything else is written and taken away at the end; until then a thread touches it every few
seconds, its heartbeat. Nothing is locked, for file locks fail or hang on some shared filesystems.

[Note: leases that nobody holds]
A crash leaves the file behind. It is taken over at once if its process is seen to be gone, or was an earlier start of
the same run, as torchrun and Slurm number them. Of another machine nothing is seen but heartbeats: without one for
`EXPIRES_S` it is taken over too. How old the last one is says a file that is written beside it, so that only one clock
counts, the filesystem's.
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

from dtlayout import toml
from dtlayout.errors import EXIT_REFUSED, DtlayoutError, InvalidConfig
from dtlayout.process import find_birth

LEASE_NAME = "running.json"
BEAT_S = 10.0
EXPIRES_S = 120.0
"""More than the minute for which an NFS client may believe what it knew of a file."""
SETTLE_S = 1.0
"""Between taking over and looking who did: of several that do so at once the last one has it."""

_STARTS = {"TORCHELASTIC_RUN_ID": "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID": "SLURM_RESTART_COUNT"}
"""What a launcher calls a run, and how often it has started it again."""
_NO_NAME = ("", "none")  # torchrun's --rdzv-id where nobody gives one


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that writes a run folder: rank 0 of a run."""

    host: str
    pid: int
    began: str
    """When, with the zone of the host."""
    machine: str
    """Boot and process namespace, in which a pid means one process; empty where that is not known."""
    birth: str
    """When the process started, in ticks since boot: a later process may have its pid."""
    restarts: dict[str, int]
    """Name of the run, as launchers have them → how often it had been started again."""

    @classmethod
    def here(cls) -> "Holder":
        """This process."""
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

    def is_gone(self, here: "Holder") -> bool:
        """Whether it surely has ended, as far as `here` can see."""
        if any(here.restarts.get(name, 0) > count for name, count in self.restarts.items()):
            return True
        return bool(self.machine) and self.machine == here.machine and find_birth(self.pid) != self.birth

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, which began {self.began}"


@contextmanager
def hold(folder: Path) -> Iterator[Callable[[], None]]:
    """A block in which a run folder, made if there is none, belongs to this process; it gives what ends that earlier.

    InvalidConfig, with who has it, if another run does. Should one take the folder over during the block, after this
    process stood still for longer than a lease lasts, the process ends with a line.
    """
    path, here, is_over = folder / LEASE_NAME, Holder.here(), threading.Event()
    text = json.dumps(asdict(here), indent=2) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _take(path, here, text)
    except OSError as error:
        raise DtlayoutError(f"train.run_folder={str(folder)!r} cannot be written: {error.strerror}") from None
    heart = threading.Thread(target=_beat, args=(path, text, is_over), name="lease", daemon=True)
    heart.start()

    def release() -> None:
        is_over.set()
        heart.join()
        with suppress(OSError):
            if path.read_text(encoding="utf-8") == text:
                path.unlink()

    try:
        yield release
    finally:
        release()


def _take(path: Path, here: Holder, text: str) -> None:
    """Make the file, or take over one that nobody holds: [Note: leases that nobody holds]."""
    while not _create(path, text):
        try:
            holder = _read(path)
            if holder is None or not holder.is_gone(here):
                _refuse_beating(path, holder, here)
        except FileNotFoundError:  # it has just ended
            continue
        who = f"of {holder} " if holder else ""
        print(f"{path} {who}was left by a run that is gone: taken over", file=sys.stderr, flush=True)
        own = path.with_name(f".{path.name}.{here.host}.{here.pid}")
        own.write_text(text, encoding="utf-8")
        os.replace(own, path)
        time.sleep(SETTLE_S)
        if path.read_text(encoding="utf-8") != text:
            raise _refusal(path, _read(path))
        return


def _create(path: Path, text: str) -> bool:
    """Whether the file was not there; of several processes one makes it."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True


def _read(path: Path) -> Holder | None:
    """Who holds a lease; None if a kill, or another version, left one that does not say."""
    try:
        return toml.parse(json.loads(path.read_text(encoding="utf-8")), Holder)
    except (ValueError, InvalidConfig):
        return None


def _refuse_beating(path: Path, holder: Holder | None, here: Holder) -> None:
    """Return once no heartbeat has come for `EXPIRES_S`; InvalidConfig at once where the process is seen, or one comes.

    FileNotFoundError if the file goes.
    """
    if holder and holder.machine and holder.machine == here.machine:
        raise _refusal(path, holder)
    beside = path.with_name(f".{path.name}.{here.host}.{here.pid}")
    beside.touch()
    last = path.stat().st_mtime
    left_s = EXPIRES_S - (beside.stat().st_mtime - last)
    beside.unlink()
    ends = time.monotonic() + left_s
    if left_s > 0:
        print(
            f"{path}: another run may still write here; looking for its heartbeat, for {left_s:.0f} s at most",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    while (left_s := ends - time.monotonic()) > 0:
        time.sleep(min(left_s, 1.0))
        if path.stat().st_mtime != last:
            raise _refusal(path, holder or _read(path))


def _refusal(path: Path, holder: Holder | None) -> InvalidConfig:
    who = str(holder) if holder else f"a process that {path} does not name"
    return InvalidConfig(
        f"train.run_folder={str(path.parent)!r} belongs to another run: {who}; use another folder, or end that run"
    )


def _beat(path: Path, text: str, is_over: threading.Event) -> None:
    """Touch the file until it is over; end the process if the file has become another's."""
    while not is_over.wait(BEAT_S):
        with suppress(OSError):  # a filesystem that is away for a while ends no run
            if (found := path.read_text(encoding="utf-8")) and found != text:
                holder = _read(path)
                print(f"{path.parent} was taken over by {holder or 'another run'}: ended", file=sys.stderr, flush=True)
                os._exit(EXIT_REFUSED)  # before it writes what is the other's
            os.utime(path)


def _find_machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
