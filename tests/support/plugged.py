"""What somebody registers who has no checkout, and the four programs that have to know it."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from launching import launch as launch_ranks
from launching import losses
from tiny import ROOT, write_tiny

from dtlayout import launch
from dtlayout.cli import main
from dtlayout.costmodel import engine
from dtlayout.models import families, presets
from dtlayout.schedules import schedules
from dtlayout.spec import cluster, kernel_table, optimizers, trackers
from dtlayout.training import observer

PLUGINS = ROOT / "tests" / "extending" / "plugins"
SCENARIO = ("--seq-len", "16", "--global-batch", "8", "--precision", "compute=float32")


ON_CPU = ("--kernels.attention=auto", "--kernels.compile=auto")
"""Instead of what is emitted, which a GPU has."""


def count_files(name: str) -> int:
    """Files that it takes: all that the plugin called `name` is made of."""
    return len(list(PLUGINS.glob(f"{name}*.*")))


@contextmanager
def plugged_in(name: str) -> Iterator[ModuleType]:
    """A block in which a plugin is imported, and after which nobody knows what it has registered."""
    module = f"extending.plugins.{name}"
    registries: list[dict[str, Any]] = [
        cluster._read_constants(), engine._read_engines(), engine._engine_tables(), *kernel_table.KERNELS.values(),
        schedules.SCHEDULES,
        families.FAMILIES, presets.PRESETS, optimizers.OPTIMIZERS, trackers.TRACKERS,
        observer.OBSERVERS,
    ]  # fmt: skip
    with ExitStack() as stack:
        for registry in registries:
            stack.enter_context(mock.patch.dict(registry))
        yield import_module(module)
    del sys.modules[module]


@dataclass(frozen=True)
class Answers:
    """What the programs said, one after the other of the same layout."""

    recommend: dict[str, Any]
    """`dtlayout recommend`, which wrote the config that the others got."""
    check: dict[str, Any]
    """`dtlayout check`."""
    dryrun: dict[str, Any]
    """`dtlayout dryrun`, of every rank."""
    config: Path
    """What was written."""
    run: Path
    """The folder of two steps."""


def ask(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """The document of a command."""
    assert main([*map(str, arguments), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def ask_programs(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    *options: str | Path,
    gpu: str = "h100-80g-sxm",
    model: str | Path | None = None,
    num_gpus: int = 1,
    plugin: str = "",
) -> Answers:
    """Recommend a layout, check what was emitted, dry-run every rank of it, and train two steps of it.

    One rank trains in this process; several do under torchrun, and are told of the plugin.
    """
    files, emitted = write_tiny(folder), folder / "emitted.toml"
    scenario = ("--model", model or files.config, "--gpu", gpu, "--gpus", num_gpus, *SCENARIO)
    recommended = ask(capsys, "recommend", *scenario, "--emit", emitted, *options)
    checked = ask(capsys, "check", emitted)
    rehearsed = ask(capsys, "dryrun", emitted, "--ranks", "all")
    data = (f"--data.source={files.corpus}", f"--data.folder={files.tokens}", "--data.max_tokens=0")
    train = ("--train.steps=2", "--train.device=cpu", f"--train.run_folder={files.run}")
    train += ON_CPU
    if num_gpus == 1:
        assert launch.main([str(emitted), *data, *train]) == 0
    else:
        with mock.patch.dict(os.environ, DTLAYOUT_PLUGINS=f"tests.extending.plugins.{plugin}"):
            log = folder / "log"
            assert launch_ranks(num_gpus, emitted, *data, *train, log=log) == 0, log.read_text()
    assert len(losses(files.run)) == 2
    return Answers(recommended, checked, rehearsed, emitted, files.run)
