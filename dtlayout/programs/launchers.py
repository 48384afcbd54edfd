"""Launchers: the GPUs that `accelerate launch`, `deepspeed`, `torchrun` or `python` starts a program on."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from dtlayout.programs.command_line import count_ranks, read_options
from dtlayout.programs.hugging_face.read_accelerate import AccelerateReader
from dtlayout.programs.hugging_face.words_reader import read_beside
from dtlayout.programs.options import positive
from dtlayout.programs.shell.script import Command, Unknown
from dtlayout.programs.understood import OtherFile, Row, Understood

_BEFORE_MODULE = re.compile("-m|--module")
"""Options of a launcher before the name of a module."""
_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
)
"""Modules that start ranks of a program behind them."""
_COUNTS = ("nproc_per_node", "nnodes", "num_gpus", "num_nodes", "include", "config_file")


class StartedProgram(NamedTuple):
    """A command, cut into what starts ranks and what the program gets."""

    program: str
    """File or module of the program; empty where the command has options alone."""
    own: list[str]
    """Words behind it."""
    accelerate: AccelerateReader | None
    """Reader of what accelerate is told, where it starts the program."""


def read_launch(command: Command, file: OtherFile, found: Understood, programs: tuple[str, ...] = ()) -> StartedProgram:
    """Note the GPUs that a command starts; `programs` are words that are a program too, beside files and modules."""
    words = list(command.words)
    place = _find_program(words, programs)
    if place is None:
        return StartedProgram("", words, None)
    before, own = words[:place], words[place + 1 :]
    names = [each.rpartition("/")[2] for each in before]
    visible = {**command.variables, **file.given}.get("CUDA_VISIBLE_DEVICES", "")
    if "accelerate" in names or "accelerate.commands.launch" in names:
        at = names.index("launch") if "launch" in names else names.index("accelerate.commands.launch")
        launch = _read_accelerate(read_options(_drop_module(before[at + 1 :]), found), file, found)
        return StartedProgram(words[place], own, launch)
    start = next((number for number, name in enumerate(names) if name in ("deepspeed", "torchrun", *_MODULES)), None)
    if start is None:
        _count_alone(words[place], visible, found, {**command.variables, **file.given})
    elif names[start].startswith("deepspeed"):
        _read_deepspeed(read_options(_drop_module(before[start + 1 :]), found), visible, found)
    else:
        options = read_options(_drop_module(before[start + 1 :]), found)
        count_ranks(options, found)
        _note(options, found)
    return StartedProgram(words[place], own, None)


def _find_program(words: list[str], programs: tuple[str, ...]) -> int | None:
    for place, word in enumerate(words):
        is_module = place > 0 and _BEFORE_MODULE.fullmatch(words[place - 1]) is not None and word not in _MODULES
        if is_module or word.endswith(".py") or word.rpartition("/")[2] in programs:
            return place
    return None


def _drop_module(words: list[str]) -> list[str]:
    return words[:-1] if words and _BEFORE_MODULE.fullmatch(words[-1]) else words


def _read_accelerate(options: Mapping[str, Any], file: OtherFile, found: Understood) -> AccelerateReader:
    said = {name.replace("-", "_"): value for name, value in options.items()}
    values: Mapping[str, Any] = {}
    path = said.pop("config_file", None)
    if path is not None:
        _, values = read_beside(path, file, "config_file")
        found.rows.append(Row(f"config_file = {path}", "its values", "read"))
    return AccelerateReader(found, values, file, said)


def _read_deepspeed(options: Mapping[str, Any], visible: str, found: Understood) -> None:
    """--num_gpus are those of a node, and --include localhost:0,1 names them."""
    include = str(options.get("include", ""))
    per_node = str(options.get("num_gpus", "")) or str(_count_devices(include.partition(":")[2]) or "")
    per_node = per_node or str(_count_devices(visible) or "")
    nodes = str(options.get("num_nodes", 1 if "hostfile" not in options and "@" not in include else ""))
    if per_node.isdigit():
        found.gpus_per_node = int(per_node)
        found.num_gpus = int(per_node) * int(nodes) if nodes.isdigit() else 0
    _note(options, found)


def _count_devices(text: Any) -> int:
    """Devices of a text such as 0,1,2; 0 for another one, or one that is not known."""
    parts = [] if isinstance(text, Unknown) else [each.strip() for each in str(text).split(",")]
    return len(parts) if parts and all(each.isdigit() for each in parts) else 0


def _note(options: Mapping[str, Any], found: Understood) -> None:
    for name, value in options.items():
        known = name.replace("-", "_") in _COUNTS
        ours = f"{found.num_gpus or '?'} GPUs" if known else ""
        found.rows.append(Row(f"{name} = {value}", ours, "read" if known else "ignored",
                              "" if known else "about how ranks meet"))  # fmt: skip


def _count_alone(program: str, visible: Any, found: Understood, variables: Mapping[str, str]) -> None:
    """`python` starts one process; programs that start torchrun themselves take all GPUs that they see."""
    per_node = str(variables.get("NPROC_PER_NODE", ""))
    nodes = str(variables.get("NNODES", 1))
    seen = _count_devices(visible)
    if per_node.isdigit() and nodes.isdigit():
        found.num_gpus, found.gpus_per_node = positive(per_node) * positive(nodes), positive(per_node)
        found.rows.append(Row(f"NPROC_PER_NODE = {per_node}", f"{found.num_gpus} GPUs", "read"))
    elif program.endswith(".py") or seen:
        count = 1 if program.endswith(".py") else seen
        found.num_gpus = found.gpus_per_node = count
        note = "python starts one process" if program.endswith(".py") else "the GPUs that it sees"
        found.rows.append(Row(f"CUDA_VISIBLE_DEVICES = {visible}" if seen else "", f"{count} GPUs", "assumed", note))
