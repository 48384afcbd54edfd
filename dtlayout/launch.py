"""What train.py does: check first, without torch; train only what passed."""

import os
import sys
from collections.abc import Sequence

from dtlayout.config import check_layout, load_config
from dtlayout.errors import DtlayoutError, InvalidConfig

USAGE = "usage: torchrun --nproc-per-node N train.py CONFIG.toml [--section.key=value ...]"


def main(arguments: Sequence[str]) -> int:
    """Run with the command line's arguments; the exit code. Refusals are lines on stderr, from one rank a node."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else InvalidConfig.exit_code
    try:
        config = load_config(arguments[0], arguments[1:])
        layout = check_layout(config, int(os.environ.get("WORLD_SIZE", "1")))

        from dtlayout.training.run import train  # only now: it imports torch

        return train(config, layout)
    except DtlayoutError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(error, file=sys.stderr, flush=True)
        return error.exit_code
