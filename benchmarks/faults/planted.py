"""A plug-in of pytest: breaks the order in which a save makes a checkpoint, as FAULT_BREAK says."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dtlayout.base.checkpoint_names import list_checkpoints
from dtlayout.checkpoint import folder, manifest, sharded


def copy_in_place() -> None:
    """The name is there before its files are: a copy, where a rename is meant."""

    def copy(source: Path, target: Path) -> None:
        if Path(source).is_symlink():
            os.replace(source, target)
        else:
            shutil.copytree(source, target)
            shutil.rmtree(source)

    _rename_by(copy)


def name_before_manifest() -> None:
    """The name is there before the manifest is."""
    later: list[Any] = []
    write = manifest.write_manifest

    def rename(source: Path, target: Path) -> None:
        os.replace(source, target)
        while later:
            files, facts = later.pop()
            write(target, files, facts)

    def postpone(partial: Path, files: Any, facts: Mapping[str, Any]) -> None:
        later.append((files, facts))

    sharded.write_manifest = postpone  # type: ignore[assignment]
    _rename_by(rename)


def manifest_before_sync() -> None:
    """The manifest is written before what it lists has reached the disk."""
    manifest.sync = lambda path: None
    folder.sync = lambda path: None


def removal_before_name() -> None:
    """Older checkpoints go before the new one has its name."""

    def remove_and_rename(source: Path, target: Path) -> None:
        if Path(source).name.startswith("partial-"):
            for old in list_checkpoints(target.parent):
                shutil.rmtree(old)
        os.replace(source, target)

    _rename_by(remove_and_rename)


def _rename_by(replace: Callable[[Path, Path], None]) -> None:
    """Give folder.py another os.replace."""
    folder.os = SimpleNamespace(**{**vars(os), "replace": replace})  # type: ignore[assignment]


BREAKS = {
    "a copy in place of the rename": copy_in_place,
    "the name before the manifest": name_before_manifest,
    "the manifest before all is synced": manifest_before_sync,
    "old ones removed before the new one has its name": removal_before_name,
}

if wanted := os.environ.get("FAULT_BREAK"):
    BREAKS[wanted]()
