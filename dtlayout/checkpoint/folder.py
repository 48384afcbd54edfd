"""How a run's folder of checkpoints changes: by one rename each time. No torch.

    partial-00000070            being written
    step-00000070               whole
    removed-step-00000070       being removed
    damaged-step-00000070       set aside, for people
    nonfinite-step-00000070     the same, since no step from it was finite
    latest                      a link to the newest

A kill leaves whole checkpoints, and what `clean` takes away.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from dtlayout.checkpoint.manifest import PREFIX, list_checkpoints, sync

_LATEST = "latest"


def name_checkpoint(folder: Path, step: int) -> Path:
    """Of the checkpoint after so many steps."""
    return folder / f"{PREFIX}{step:08d}"


def name_partial(folder: Path, step: int) -> Path:
    """Of that checkpoint while it is written."""
    return folder / f"partial-{step:08d}"


def make_empty(partial: Path) -> None:
    """Make this folder, in the place of what a killed save has left."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def publish(partial: Path, path: Path, keep: int) -> None:
    """Give a whole checkpoint its name, so that it is on the disk; only then older ones go, but the `keep` newest."""
    if path.exists():  # the same step again, after a resume from an older checkpoint
        _remove(path)
    os.replace(partial, path)
    sync(path.parent)
    _point_to(path)
    for old in list_checkpoints(path.parent)[:-keep]:
        with suppress(OSError):  # it goes with the next one's
            _remove(old)


def clean(folder: Path) -> None:
    """Take away what killed saves and removals have left; by one process, while nobody saves there."""
    for left in [*folder.glob("partial-*"), *folder.glob("removed-*")]:
        shutil.rmtree(left, ignore_errors=True)


def set_aside(newest: Path, mark: str = "damaged") -> list[Path]:
    """Rename checkpoints newer than the one that is gone on from to `mark`-step-…; they stay, and count as none."""
    aside = []
    for path in list_checkpoints(newest.parent):
        if path.name > newest.name:
            doomed = path.with_name(f"{mark}-{path.name}")
            shutil.rmtree(doomed, ignore_errors=True)
            os.replace(path, doomed)
            aside.append(doomed)
    if aside:
        _point_to(newest)
    return aside


def _point_to(path: Path) -> None:
    """Move the link `latest`, for people and scripts; a filesystem without links has none."""
    link = path.with_name(f".{_LATEST}.new")
    with suppress(OSError):
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        os.replace(link, path.with_name(_LATEST))


def _remove(path: Path) -> None:
    """Remove a checkpoint so that a kill leaves nothing that looks like a whole one."""
    doomed = path.with_name(f"removed-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)  # of an earlier removal that was killed
    os.replace(path, doomed)
    shutil.rmtree(doomed)
