"""The memory limit that Linux's control groups set for this process: a container, a Slurm job, a systemd unit.

Such a group lies inside others, and each of them may have a limit; the smallest one counts. /proc says which group the
process is in, and where groups are mounted as folders, in version 1 (a hierarchy for memory alone) and in version 2. In
a container either path may begin above what is mounted there: then its mount is the group itself.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_LIMITS = {"cgroup": "memory.limit_in_bytes", "cgroup2": "memory.max"}
"""Filesystem of a version of control groups → the file with the limit of a group."""
_INHERITED = "hierarchical_memory_limit"
"""Key in memory.stat of version 1: the smallest limit of a group and of the groups around it, hidden ones too."""


def find_memory_limit(proc: Path = Path("/proc/self"), root: Path = Path("/")) -> int | None:
    """The memory limit of this process in bytes: the smallest limit of the control groups around it.

    None if no limit can be read, for instance without /proc. A group of version 1 that has no limit counts as one of
    about 2^63 bytes, so compare the result with the host's memory. Memory in use is not subtracted.

    `proc` is the folder of the process in /proc. Mount points that it names are looked up below `root`.
    """
    limits = [limit for folder, name in _list_groups(proc, root) for limit in _read_limits(folder, name)]
    return min(limits, default=None)


def _list_groups(proc: Path, root: Path) -> Iterator[tuple[Path, str]]:
    """Folders of all groups around a process, the innermost first, and the name of the file with their limit."""
    try:
        groups = dict(_parse_groups((proc / "cgroup").read_text(encoding="utf-8")))
        mounts = (proc / "mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), (*after.split(), "", "", "")[:3]
        if len(fields) < 5 or kind not in groups or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        top = root / _unescape(fields[4]).lstrip("/")
        inside = _find_below(groups[kind], _unescape(fields[3]))
        for depth in range(len(inside), -1, -1):
            yield top.joinpath(*inside[:depth]), _LIMITS[kind]


def _parse_groups(text: str) -> Iterator[tuple[str, str]]:
    """Filesystem of a version → path of the group there that limits memory, as pairs."""
    for line in text.splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if "memory" in controllers.split(","):
            yield "cgroup", path
        elif number == "0" and not controllers:
            yield "cgroup2", path


def _find_below(path: str, mounted: str) -> tuple[str, ...]:
    """Names of the folders from the mounted one down to a group; none if the group does not lie below it."""
    try:
        inside = PurePosixPath(path).relative_to(mounted).parts
    except ValueError:
        return ()
    return () if ".." in inside else inside


def _unescape(field: str) -> str:
    """A path of mountinfo with its blanks: the file writes them as octal numbers."""
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")


def _read_limits(folder: Path, name: str) -> Iterator[int]:
    with suppress(OSError, ValueError):  # no such group, or one without a limit: "max"
        yield int((folder / name).read_text(encoding="utf-8"))
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{_INHERITED} "):
                yield int(line.split()[1])
