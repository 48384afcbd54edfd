"""dtlayout checkpoint: list what a run has saved, and verify that files are still as they were written."""

import argparse
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dtlayout.base.errors import EXIT_REFUSED, CheckpointError
from dtlayout.base.formatting import align
from dtlayout.checkpoint.manifest import find_checkpoints, find_damage, read_manifest
from dtlayout.commands.arguments import JsonDocument, show

EXAMPLE = "dtlayout checkpoint verify runs/debug"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action, and the run or checkpoint that it is done with."""
    parser.add_argument(
        "action",
        choices=("list", "show", "verify"),
        help="list all, show what wrote the newest, or read every byte and compare it with the manifest",
    )
    parser.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT")


def run(options: argparse.Namespace) -> int:
    """Print a line for each checkpoint, or what one was written by; exit code 2 if one is damaged."""
    found = find_checkpoints(options.source.resolve())
    if options.action == "show":
        return _show(options, found[-1])
    if options.action == "list":
        return show(options, [_read_facts(path) for path in found], _list_facts)
    damage = {str(path): _verify(path) for path in found}
    show(options, damage, _list_damage)
    return EXIT_REFUSED if any(damage.values()) else 0


def _verify(path: Path) -> list[str]:
    if _read(path) is None:
        return ["has no manifest: it was saved by a version that wrote none, so nothing can be compared"]
    num_threads = os.cpu_count() or 1
    with ThreadPoolExecutor(num_threads) as pool:
        found = pool.map(lambda first: find_damage(path, first, num_threads), range(num_threads))
        return list(dict.fromkeys(problem for problems in found for problem in problems))


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return {}


def _list_damage(damage: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{path}: {'; '.join(problems) or 'whole'}" for path, problems in damage.items()]


def _read_facts(path: Path) -> dict[str, Any]:
    manifest = _read(path) or {}
    num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    facts = {name: manifest.get(name, "?") for name in ("step", "samples", "layout", "ranks")}
    return {"checkpoint": path.name, **facts, "MB": round(num_bytes / 1e6, 1)}


def _list_facts(rows: Sequence[JsonDocument]) -> list[str]:
    return align([list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)])


def _show(options: argparse.Namespace, path: Path) -> int:
    manifest = dict(read_manifest(path) or {})
    if not manifest:
        raise CheckpointError(f"{path} has no manifest: it was saved by a version that wrote none")
    config, files = manifest.pop("config", ""), manifest.pop("files")
    facts = [f"{name}: {value}" for name, value in manifest.items()]
    lines = [f"{name}  {file['bytes']:,} bytes  sha256 {file['sha256']}" for name, file in files.items()]
    document = {**manifest, "config": config, "files": files}
    return show(options, document, lambda _: [str(path), *facts, "", *lines, "", config])
