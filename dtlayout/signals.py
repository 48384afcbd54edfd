"""Signals as a wish to stop after the step, noted from before torch is imported until the run has ended.

[Note: signals before the first step]
Start-up can take longer than the grace time: torch is imported, tokens are prepared, others are waited for. Until all
ranks have met, a signal raises Stopped, and the process ends; launchers signal all of them. Where they meet
(`training.rendezvous.meet`) they agree whether one was asked to stop, so that none goes on alone into collectives. From
there on a signal is a wish, which all hear of before the first step and with each step's numbers.

Modules in C++ abort the process if anything is raised while they are imported, so a signal waits for an import.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGUSR1 is what Slurm is asked to send before a job's time is over (sbatch --signal)."""


class Stopped(BaseException):
    """A signal came before anything was begun that has to be finished."""


class StopRequest:
    """Whether a signal has asked this process to stop."""

    is_made = False
    is_early = False
    """Whether nothing has begun that has to be finished: then the signal raises Stopped where the process is."""

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """A block at whose end an early signal raises Stopped, and not within."""
        was_early, self.is_early = self.is_early, False
        try:
            yield
        finally:
            self.is_early = was_early
        if was_early and self.is_made:
            raise Stopped


@contextmanager
def note_signals() -> Iterator[StopRequest]:
    """A block in which these signals only make the request; what handled them before comes back at its end."""
    request = StopRequest()

    def note(*_: object) -> None:
        is_first, request.is_made = not request.is_made, True
        if request.is_early and is_first:
            raise Stopped

    handlers = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
