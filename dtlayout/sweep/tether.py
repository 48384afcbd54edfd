"""Run a program that does not outlive its parent: python -m dtlayout.sweep.tether PARENT PROGRAM [ARGUMENT …]

A sweep that is killed with SIGKILL cannot end its trial; Linux does it then, with SIGTERM, which torchrun hands on to
its workers. Elsewhere the program runs untethered.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Become the program, as long as the process `parent` lives."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the signal was asked for
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
