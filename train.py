"""Train a Llama: torchrun --nproc-per-node N train.py CONFIG.toml [--section.key=value …]

Reads the config, checks it before torch is imported, trains, and returns the exit code: 0 done, 2 refused, 3 stopped by
a signal with all its steps saved, 4 non-finite loss.
"""

import os
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # which PYTHONSAFEPATH leaves out

if __name__ == "__main__":  # first of all: the imports below take a second
    from dtlayout.base.signals import end_at_once

    end_at_once()

from dtlayout.base.process import leave
from dtlayout.launch import main

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
