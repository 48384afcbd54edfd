"""A plug-in: the n-th change of a file in the save of step n fails on one rank, as on a disk that is full just then.

FAULT_RANK is the rank and FAULT_LOG a file, which gets a line for each that failed. Writes to a file in a row are one.
"""

import errno
import os
import re
from pathlib import Path

from tests.support.watched_disk import watched_disk

_STEP = re.compile(r"checkpoints/(?:partial|step|removed-step)-(\d+)")


class _Failing:
    """Counts the changes of a save, and fails one of each."""

    def __init__(self, log: Path):
        self.log = log
        self.step = self.number = 0
        self.last: tuple[str, Path] | None = None

    def __call__(self, operation: str, path: Path) -> None:
        if "/checkpoints" not in str(path) or (operation, path) == self.last:
            return
        found = _STEP.search(str(path))
        if found and "partial" in found[0] and int(found[1]) != self.step:
            self.step, self.number = int(found[1]), 0
        self.number, self.last = self.number + 1, (operation, path)
        if self.number == self.step:
            self.last = None  # the same once more is another one
            with os.fdopen(os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "w") as file:
                file.write(f"{self.step} {operation} {path.name}\n")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


if os.environ.get("RANK") == os.environ["FAULT_RANK"]:
    _watched = watched_disk(_Failing(Path(os.environ["FAULT_LOG"])))  # kept: it ends when nothing refers to it
    _watched.__enter__()
