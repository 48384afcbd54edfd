"""What train.py does: check first, without torch; train only what passed.

torchrun restarts workers after any exit code but 0 (`--max-restarts`), also after a refusal or a non-finite loss. So a
restarted process looks at RUN/summary.json first, and if the run has ended there, it ends the same way again.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dtlayout.config import Config, check_layout, load_config
from dtlayout.errors import EXIT_REFUSED, DtlayoutError
from dtlayout.training.metrics import SUMMARY_NAME, Summary

USAGE = "usage: torchrun --nproc-per-node N train.py CONFIG.toml [--section.key=value ...]"


def main(arguments: Sequence[str]) -> int:
    """Run with the command line's arguments; the exit code. Refusals are lines on stderr, from one rank a node."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else EXIT_REFUSED
    try:
        config = load_config(arguments[0], arguments[1:])
        return _run(config)
    except DtlayoutError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(error, file=sys.stderr, flush=True)
        return error.exit_code


def _run(config: Config) -> int:
    folder = Path(config.train.run_folder)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and (ended := _read_exit_code(folder)) is not None:
        return ended
    try:
        layout = check_layout(config, int(os.environ.get("WORLD_SIZE", "1")))
    except DtlayoutError as error:
        is_writer = os.environ.get("RANK", "0") == "0"
        if is_writer and not (folder / SUMMARY_NAME).exists():  # an earlier run's summary is worth more
            Summary(outcome="refused", exit_code=error.exit_code, problems=str(error).splitlines()).write(folder)
        raise

    from dtlayout.training.run import train  # only now: it imports torch

    return train(config, layout)


def _read_exit_code(folder: Path) -> int | None:
    """How the run in a folder ended; None if it did not."""
    try:
        code: int | None = json.loads((folder / SUMMARY_NAME).read_text(encoding="utf-8")).get("exit_code")
    except (OSError, ValueError):
        return None
    return code
