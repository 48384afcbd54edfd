"""Signals as a wish to stop after the step, noted from before torch is imported until the run has ended."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGUSR1 is what Slurm is asked to send before a job's time is over (sbatch --signal)."""


class StopRequest:
    """Whether a signal has asked this process to stop."""

    is_made = False


@contextmanager
def note_signals() -> Iterator[StopRequest]:
    """A block in which these signals only make the request; what handled them before comes back at its end."""
    request = StopRequest()

    def note(*_: object) -> None:
        request.is_made = True

    handlers = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
