"""A checkpoint that is written by a thread while training goes on.

At most one is under way on a rank. The thread talks over a group of its own, so what training sends meanwhile is in
nobody's way, and it is a daemon: a process that ends because something else went wrong does not wait for it.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from dtlayout.base.errors import CheckpointError


class Saving:
    """One save, begun when this is made."""

    def __init__(self, step: int, write: Callable[[], Path]):
        """`write` gives the checkpoint, or raises CheckpointError on all ranks."""
        self.step = step
        self._write = write
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"save of step {step}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._path = self._write()
        except BaseException as error:  # raised where it is waited for
            self._error = error

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns at once."""
        return not self._thread.is_alive()

    def wait_for_end(self) -> None:
        """Wait until it has ended, well or not."""
        self._thread.join()

    def wait(self) -> Path:
        """The checkpoint, when it is whole; CheckpointError if it could not be written."""
        self.wait_for_end()
        if self._error is not None:
            raise self._error
        if self._path is None:
            raise CheckpointError(f"the save of step {self.step} has ended without a word")
        return self._path
