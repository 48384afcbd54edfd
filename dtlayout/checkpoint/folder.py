"""How a run's folder of checkpoints changes: by one rename each time. No torch.

    partial-00000070-WRITER     being written, by the first rank of one start of a run
    step-00000070               whole
    removed-step-00000070       being removed
    damaged-step-00000070       set aside, for people
    nonfinite-step-00000070     the same, since no step from it was finite
    latest                      a link to the newest

A kill leaves whole checkpoints, and what `clean` takes away. All of them are in one folder of a run, and nothing
outside it is ever removed or renamed: links count as where they lead (`check_own`). Before each of these changes `look`
is called, which does not return where the folder has become another run's.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dtlayout.base.checkpoint_names import PREFIX, list_checkpoints
from dtlayout.base.errors import CheckpointError
from dtlayout.base.process import RENAMING
from dtlayout.checkpoint.manifest import sync

_LATEST = "latest"


def name_checkpoint(folder: Path, step: int) -> Path:
    """The path of the checkpoint after `step` steps."""
    return folder / f"{PREFIX}{step:08d}"


def name_partial(folder: Path, step: int, writer: str) -> Path:
    """The path of that checkpoint while it is written; `writer` is the writing process's `process.name_process()`."""
    return folder / f"partial-{step:08d}-{writer}"


def check_own(folder: Path) -> None:
    """CheckpointError if the folder of checkpoints is a link that leads out of the run folder, its parent.

    What lies there may be another run's, whose checkpoints would be removed as old ones of this run.
    """
    real, run = os.path.realpath(folder), os.path.realpath(os.path.dirname(os.path.abspath(folder)))
    if os.path.commonpath([real, run]) != run:
        raise CheckpointError(
            f"{folder} leads to {real}, outside the run folder, where other runs' checkpoints may be: remove the link, "
            f"or have train.run_folder itself lead to where there is room"
        )


def make_empty(partial: Path, look: Callable[[], None]) -> None:
    """Make this folder, in the place of what a save that failed has left."""
    look()
    check_own(partial.parent)
    _take_away(partial)
    partial.mkdir(parents=True)


def drop(partial: Path) -> None:
    """Take away a save that has failed."""
    with suppress(CheckpointError):  # then nothing was written
        check_own(partial.parent)
        _take_away(partial)


def publish(partial: Path, path: Path, keep: int, look: Callable[[], None]) -> None:
    """Give a whole checkpoint its name, so that it is on the disk; only then older ones go, but the `keep` newest."""
    folder, doomed = path.parent, _name_doomed(path)
    look()
    check_own(folder)
    if is_again := os.path.lexists(path):  # the same step, or by now that of a run which has taken over
        _take_away(doomed)
    with RENAMING:
        if is_again:
            os.replace(path, doomed)
        try:
            os.replace(partial, path)
        except OSError:
            if is_again:
                with suppress(OSError):
                    os.replace(doomed, path)
            raise
    sync(folder)
    if is_again:
        _take_away(doomed)
    _point_to(path)
    for old in list_checkpoints(folder)[:-keep]:
        with suppress(OSError):  # it goes with the next one's
            look()
            _remove(old)


def clean(folder: Path, look: Callable[[], None]) -> None:
    """Take away what killed saves and removals have left; by one process, while nobody saves there."""
    check_own(folder)
    for left in [*folder.glob("partial-*"), *folder.glob("removed-*")]:
        look()
        _take_away(left)


def set_aside(newest: Path, look: Callable[[], None], mark: str = "damaged") -> list[Path]:
    """Rename the checkpoints newer than `newest` to `mark`-step-…, and return their new paths.

    The run goes on from `newest`, so the link `latest` then leads there. Renamed checkpoints stay, but no search finds
    them. A folder that already has such a name is removed.
    """
    check_own(newest.parent)
    aside = []
    for path in list_checkpoints(newest.parent):
        if path.name > newest.name:
            look()
            doomed = path.with_name(f"{mark}-{path.name}")
            _take_away(doomed)
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


def _name_doomed(path: Path) -> Path:
    return path.with_name(f"removed-{path.name}")


def _remove(path: Path) -> None:
    """Remove a checkpoint so that a kill leaves nothing that looks like a whole one."""
    doomed = _name_doomed(path)
    _take_away(doomed)  # of an earlier removal that was killed
    os.replace(path, doomed)
    _take_away(doomed)


def _take_away(path: Path) -> None:
    """Remove a folder as far as it can be; of a link, the link alone."""
    if os.path.islink(path):
        with suppress(OSError):
            os.unlink(path)
    else:
        shutil.rmtree(path, ignore_errors=True)
