"""Observer: ends a process whose run folder has become another run's."""

from contextlib import suppress

from dtlayout.base.lease import TRUSTED_S, Lease
from dtlayout.training.observer import ObservedStep, Observer


class FolderObserver(Observer):
    """Checks the lease of the run folder before anything is written there."""

    def __init__(self, lease: Lease | None):
        """`lease` is None on ranks that write nothing."""
        self.lease = lease

    def look(self) -> None:
        """Return if the folder is still this run's; end the process if not."""
        if self.lease:
            with suppress(OSError):  # a filesystem that is away for a while ends no run
                self.lease.check(TRUSTED_S)

    def on_result(self, step: ObservedStep) -> None:
        self.look()
