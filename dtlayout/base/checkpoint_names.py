"""Names in a run's folder by which checkpoints are found: RUN/checkpoints/step-00000070/state.json and its manifest."""

import os
import re
from pathlib import Path

MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.json"
PREFIX = "step-"
CHECKPOINTS = "checkpoints"
"""The folder of a run in which they are."""


def is_checkpoint(folder: Path) -> bool:
    """True if a folder is one checkpoint."""
    return any(os.path.isfile(folder / name) for name in (MANIFEST_NAME, STATE_NAME))


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints, oldest first, none where there is no such folder; OSError if it cannot be read.

    Only names are read: a folder gets such a name once it is whole, and `find_damage` tells whether it lost a file
    later.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(folder / name for name in names if re.fullmatch(rf"{PREFIX}\d{{8,}}", name))


def list_saved(place: Path) -> list[Path]:
    """The checkpoint that `place` is, or those of the run whose folder it is, oldest first; OSError as above."""
    return [place] if is_checkpoint(place) else list_checkpoints(place / CHECKPOINTS)


def read_step(checkpoint: Path) -> int:
    """The steps that a checkpoint has seen, as its name says."""
    return int(checkpoint.name.removeprefix(PREFIX))
