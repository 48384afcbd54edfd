"""Signals as a wish to stop after the step, noted from before torch is imported until the run has ended.

[Note: signals before the first step]
Start-up can take longer than the grace time: torch is imported, tokens are prepared, others are waited for, most of it
in C++, where Python hears of no signal and an exception would tear something. Until all ranks have met, nothing is
begun that has to be finished, and a thread ends the process; launchers signal all of them. Where they meet
(`training.rendezvous.meet`) they agree whether one was asked to stop, so that none goes on alone into collectives. From
there on a signal is a wish, which all hear of before the first step and with each step's numbers.
"""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGUSR1 is what Slurm is asked to send before a job's time is over (sbatch --signal)."""


class Stopped(Exception):
    """All ranks have agreed, before anything was begun, to begin nothing."""


class StopRequest:
    """Whether a signal has asked this process to stop."""

    is_made = False

    def __init__(self) -> None:
        self.changing = threading.Lock()
        """Held by who changes what `early_end` has to know of, and while that ends the process."""
        self.early_end: Callable[[], object] | None = None
        """Called by a thread when a signal comes; None once something has begun that has to be finished."""

    def begin(self) -> None:
        """From now on a signal is a wish."""
        with self.changing:
            self.early_end = None

    def listen(self, signals: socket.socket) -> None:
        """Hear of signals where the main thread may not, until the other end is closed."""
        while signals.recv(1):
            with self.changing:
                if self.early_end is not None:
                    self.early_end()


@contextmanager
def note_signals() -> Iterator[StopRequest]:
    """A block in which these signals only make the request; what handled them before comes back at its end."""
    request = StopRequest()

    def note(*_: object) -> None:
        request.is_made = True

    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    listener = threading.Thread(target=request.listen, args=(ours,), name="signals", daemon=True)
    listener.start()
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield request
    finally:
        request.begin()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        theirs.close()
        listener.join()
        ours.close()
