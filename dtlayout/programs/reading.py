"""Reading: files of other programs as jobs of ours; a further program is a row of `READERS`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs import (
    read_automodel,
    read_bridge,
    read_flagscale,
    read_megatron,
    read_nanotron,
    read_nemo,
    read_nemo2,
    read_torchtitan,
    read_yaml_cfg,
)
from dtlayout.programs.automodel import AUTOMODEL
from dtlayout.programs.megatron import MEGATRON
from dtlayout.programs.nanotron import NANOTRON
from dtlayout.programs.program import Program
from dtlayout.programs.torchtitan import TORCHTITAN
from dtlayout.programs.trees import read_tree
from dtlayout.programs.understood import ChooseOptions, OtherFile, Understood


class FileReader(NamedTuple):
    """Reader of one program's files."""

    title: str
    """Files that it reads, for people."""
    is_ours: Callable[[OtherFile], bool]
    """True for such a file."""
    read: Callable[[OtherFile], Understood]
    """Job of such a file. What is not understood is in its `problems`, or an InvalidConfig."""
    options: ChooseOptions | None = None
    """Function by which the program says a layout, as `Program.options`; None where such files are not changed."""
    together: Sequence[frozenset[str]] = ()
    """Options that say one thing together, as `Program.together`."""


def _change_as(program: Program) -> tuple[ChooseOptions, Sequence[frozenset[str]]]:
    """The last fields of a reader whose files are changed by the options that a program's writer chooses."""
    return program.options, program.together


READERS = (
    FileReader("YAML of FlagScale or of Megatron-LM's options", read_flagscale.is_ours, read_flagscale.read),
    FileReader("YAML or a command of NeMo 1", read_nemo.is_ours, read_nemo.read),
    FileReader("YAML or a command of NeMo 2", read_nemo2.is_ours, read_nemo2.read),
    FileReader("YAML or a command of Megatron-Bridge", read_bridge.is_ours, read_bridge.read),
    FileReader("YAML for Megatron-LM's --yaml-cfg", read_yaml_cfg.is_ours, read_yaml_cfg.read),
    FileReader("a script of Megatron-LM", read_megatron.is_ours, read_megatron.read, *_change_as(MEGATRON)),
    FileReader(
        "a TOML file or a command of torchtitan", read_torchtitan.is_ours, read_torchtitan.read, *_change_as(TORCHTITAN)
    ),
    FileReader("a YAML file of nanotron", read_nanotron.is_ours, read_nanotron.read, *_change_as(NANOTRON)),
    FileReader(
        "a YAML file or a command of NeMo AutoModel",
        read_automodel.is_ours,
        read_automodel.read,
        *_change_as(AUTOMODEL),
    ),
)
"""Readers, of which the first takes a file that is its own."""


def read_program(path: Path, given: Mapping[str, str], num_gpus: int = 0) -> Understood | None:
    """The job of another program's file; None for a config of ours, or where nothing can be read.

    `num_gpus` take the place of those that the file starts; 0 leaves them. InvalidConfig with a line for each option
    that is not understood.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError):
        return None
    return read_again(OtherFile(path, text, None, given, num_gpus), text)


def read_again(file: OtherFile, text: str) -> Understood | None:
    """The job of a file with another text; None and InvalidConfig as `read_program`."""
    file = file._replace(text=text, tree=read_tree(text, file.given))
    reader = next((each for each in READERS if each.is_ours(file)), None)
    if reader is None:
        return None
    try:
        found = reader.read(file)
        if found.problems:
            raise InvalidConfig(list(dict.fromkeys(found.problems)))
    except InvalidConfig as error:
        raise InvalidConfig([f"{file.path}: {each}" for each in error.problems]) from None
    found.file, found.options, found.together = (
        file,
        found.options or reader.options,
        found.together or reader.together,
    )
    return found


def parse_given(texts: list[str]) -> dict[str, str]:
    """Variable → value, of texts such as TP=4; InvalidConfig for others."""
    found = dict[str, str]()
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise InvalidConfig(f"--given {text} is no NAME=VALUE, such as TP=4")
        found[name] = value
    return found
