"""Signals as a wish to stop after the step, noted from before torch is imported until the run has ended.

[Note: signals before the first step]
Start-up can take longer than the grace time: torch is imported, tokens are prepared, other ranks are waited for. Most
of that is in C++, where Python hears of no signal and an exception would break something. Until all ranks have met,
nothing has begun that must be finished, so a thread ends the process at once; launchers signal all ranks. When the
ranks meet (`training.rendezvous.meet`), they agree whether one of them was asked to stop, so that none goes on alone
into collectives. From then on a signal is only a wish. All ranks hear of it before the first step and with each step's
numbers.

Before `note_signals` Python has imported what the checks need, which takes a second. `end_at_once` has a signal end the
process there, with a line in the place of a traceback. A command that checks before it starts ranks does so in a block
of `ending_early`: people meet one end, whichever process their signal finds.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dtlayout.base.errors import EXIT_STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGUSR1 is the signal that Slurm is asked to send before a job's time is over (sbatch --signal)."""


STOPPED_EARLY = "stopped before the first step: all is as it was"
"""Line of a start that a signal has ended before it has trained."""


class Stopped(Exception):
    """Raised when all ranks have agreed to stop before anything was begun."""


class StopRequest:
    """Holds whether a signal has asked this process to stop."""

    is_made = False

    def __init__(self) -> None:
        self.changing = threading.Lock()
        """Lock for changes of state that `early_end` reads, also held while `early_end` ends the process."""
        self.early_end: Callable[[], object] | None = None
        """Called by a thread when a signal comes; None once something has begun that must be finished."""
        self.on_wish: Callable[[], object] | None = None
        """Called once, by a thread, when a signal comes that is only a wish; it tells people what is waited for."""

    def begin(self) -> None:
        """Make signals only a wish from now on."""
        with self.changing:
            self.early_end = None

    def listen(self, signals: socket.socket) -> None:
        """Receive signals while the main thread cannot, until the other end is closed; runs in a thread."""
        while signals.recv(1):
            with self.changing:
                if self.early_end is not None:
                    self.early_end()
                elif self.on_wish is not None:
                    tell, self.on_wish = self.on_wish, None
                    tell()


def end_at_once() -> None:
    """Have these signals end the process with a line, as long as `note_signals` has not taken over."""
    for number in SIGNALS:
        signal.signal(number, _end)


def _end(*_: object) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(STOPPED_EARLY, file=sys.stderr, flush=True)
    os._exit(EXIT_STOPPED)


@contextmanager
def ending_early() -> Iterator[None]:
    """A block in which these signals end the process at once, with the line of a start that has not trained."""
    with note_signals() as request:
        request.early_end = _end
        yield
    if request.is_made:  # it came while the block ended
        _end()


def _ignore(*_: object) -> None:
    """Do nothing; unlike SIG_IGN, processes that are started do not inherit it."""


@contextmanager
def note_signals() -> Iterator[StopRequest]:
    """A block in which these signals only set the request; at its end the earlier handlers come back.

    That of `end_at_once` does not, since the run is over then, and the process ends by itself.
    """
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
            signal.signal(number, _ignore if handler is _end else handler)
        signal.set_wakeup_fd(before)
        theirs.close()
        listener.join()
        ours.close()
