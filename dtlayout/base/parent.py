"""A process that does not outlive its parent, also where the parent is killed and can end nobody. Linux alone."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have Linux send SIGTERM to this process when `parent` ends, which has started it; on other systems do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the signal was asked for
            sys.exit(1)
