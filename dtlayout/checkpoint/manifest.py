"""The manifest of a whole checkpoint: each file's size and hash, and the versions that wrote it. No torch.

    step-00000070/manifest.json     written last, before the folder gets its name

A byte that has changed since, a file that is missing or cut, and a manifest that is not what was written are found by
reading everything once, which many may share.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dtlayout.base import toml
from dtlayout.base.checkpoint_names import CHECKPOINTS, MANIFEST_NAME, STATE_NAME, list_saved
from dtlayout.base.errors import CheckpointError, DtlayoutError
from dtlayout.base.files import hash_file, parse_json
from dtlayout.models.first_source import find_place

FORMAT = 2
"""Number of the format in state.json, since checkpoints have a manifest. Older ones have none and cannot be checked."""
Files = dict[str, dict[str, Any]]


def find_checkpoints(source: Path) -> list[Path]:
    """A checkpoint, or those of a run folder, oldest first; CheckpointError if there is none."""
    try:
        found = list_saved(source)
    except OSError as error:
        raise CheckpointError(f"{source / CHECKPOINTS} cannot be read: {error.strerror}") from None
    if not found:
        raise CheckpointError(f"{source} is no checkpoint and no run folder with one")
    return found


def find_checkpoint(source: Path) -> Path:
    """A checkpoint, or the newest one of a run folder; CheckpointError if there is none."""
    return find_checkpoints(source)[-1]


def describe_files(folder: Path, names: Iterable[str]) -> Files:
    """Size and hash of files below a folder, which are on the disk when this returns; OSError if that fails."""
    paths = {name: folder / name for name in names}
    # Whoever wrote them may have synced before the last buffer was written, as DCP does.
    for path in {*paths.values(), *(path.parent for path in paths.values())}:
        sync(path)
    return {name: {"bytes": path.stat().st_size, "sha256": hash_file(path)} for name, path in paths.items()}


def write_manifest(folder: Path, files: Files, facts: Mapping[str, Any]) -> None:
    """Write it so that it is on the disk, with all names of the folder, when this returns."""
    document = {**facts, "files": dict(sorted(files.items()))}
    text = json.dumps({**document, "sha256": _hash_document(document)}, indent=2) + "\n"
    with (folder / MANIFEST_NAME).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync(folder)


def sync(path: Path) -> None:
    """Have what is in a file, or the names in a folder, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(checkpoint: Path) -> dict[str, Any] | None:
    """The manifest; None of a checkpoint that was saved before there were any, CheckpointError if it is damaged."""
    path = checkpoint / MANIFEST_NAME
    try:
        if not path.exists() and parse_json((checkpoint / STATE_NAME).read_text("utf-8")).get("format", 1) < FORMAT:
            return None
        document: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        written = document.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST_NAME} cannot be read: {type(error).__name__} {error}") from None
    if written != _hash_document(document):
        raise CheckpointError(f"{MANIFEST_NAME} is not what was written")
    if problem := _find_misfit(document.get("files")):
        raise CheckpointError(f"{MANIFEST_NAME} {problem}")
    return document


def _find_misfit(files: Any) -> str:
    """Why this is no description of files below a checkpoint; empty if it is one."""
    if not isinstance(files, dict):
        return "lists no files"
    for name, written in files.items():
        parts = name.split("/")
        if not all(parts) or {".", ".."} & {*parts} or os.path.isabs(name):
            return f"lists {name[:100]!a}, which is no file of the checkpoint"
        kept = (written.get("bytes"), written.get("sha256")) if isinstance(written, dict) else ()
        if [*map(type, kept)] != [int, str]:
            return f"does not say how {name[:100]!a} was written"
    return ""


def describe_other_start(checkpoint: Path, init_from: str) -> list[str]:
    """A line if a run that goes on from `checkpoint` names another `train.init_from` than it did; none without one.

    `init_from` is not read then: the weights are those of the checkpoint.
    """
    try:
        before = toml.loads((read_manifest(checkpoint) or {}).get("config", ""))["train"].get("init_from", "")
        if not init_from or find_place(init_from).resolve() == (find_place(before).resolve() if before else None):
            return []
    except (DtlayoutError, OSError, ValueError, KeyError, TypeError, AttributeError):  # damage is said elsewhere
        return []
    was = f"was {before}" if before else "was not named"
    return [
        f"train.init_from {was} when {checkpoint} was saved and is {init_from}, which is not read: the run goes on "
        f"with its own weights; with another train.run_folder one begins from {init_from}"
    ]


def find_damage(checkpoint: Path, first: int = 0, every: int = 1) -> list[str]:
    """Problems of a checkpoint's files, one line each; empty if none is found.

    Of the files that the manifest lists those with numbers `first`, `first + every`, … are read; every call checks the
    manifest itself. A checkpoint of a version that wrote no manifests has no known problem. One that has lost its
    manifest has one.
    """
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointError as error:
        return [str(error)]
    if manifest is None:
        return []
    damage = []
    for name, written in list(manifest["files"].items())[first::every]:
        path = checkpoint / name
        try:
            found = path.stat().st_size
            if not path.is_file():  # a pipe would be waited for
                damage.append(f"{name} is no file")
            elif found != written["bytes"]:
                damage.append(f"{name} has {found} bytes and was written with {written['bytes']}")
            elif hash_file(path) != written["sha256"]:
                damage.append(f"{name} is not what was written: its hash is another one")
        except FileNotFoundError:
            damage.append(f"{name} is missing")
        except OSError as error:
            damage.append(f"{name} cannot be read: {error.strerror}")
    return damage


def _hash_document(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
