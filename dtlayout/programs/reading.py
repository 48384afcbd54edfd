"""Reading: files of other programs as jobs of ours; a further program is a row of `READERS`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs import (
    read_accelerate,
    read_axolotl,
    read_deepspeed,
    read_llama_factory,
    read_megatron,
    read_torchtitan,
    read_trainer_script,
    read_trl,
)
from dtlayout.programs.trees import read_tree
from dtlayout.programs.understood import OtherFile, Understood


class FileReader(NamedTuple):
    """Reader of one program's files."""

    title: str
    """Files that it reads, for people."""
    is_ours: Callable[[OtherFile], bool]
    """True for such a file."""
    read: Callable[[OtherFile], Understood]
    """Job of such a file. What is not understood is in its `problems`, or an InvalidConfig."""


READERS = (
    FileReader("a script of Megatron-LM", read_megatron.is_ours, read_megatron.read),
    FileReader("a TOML file or a command of torchtitan", read_torchtitan.is_ours, read_torchtitan.read),
    FileReader("DeepSpeed's JSON", read_deepspeed.is_ours, read_deepspeed.read),
    FileReader("accelerate's YAML", read_accelerate.is_ours, read_accelerate.read),
    FileReader("a YAML file or a command of axolotl", read_axolotl.is_ours, read_axolotl.read),
    FileReader("a YAML file or a command of LLaMA-Factory", read_llama_factory.is_ours, read_llama_factory.read),
    FileReader("a YAML file or a command of TRL", read_trl.is_ours, read_trl.read),
    FileReader("a command of Hugging Face's Trainer", read_trainer_script.is_ours, read_trainer_script.read),
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
    file = OtherFile(path, text, read_tree(text, given), given, num_gpus)
    reader = next((each for each in READERS if each.is_ours(file)), None)
    if reader is None:
        return None
    try:
        found = reader.read(file)
        if found.problems:
            raise InvalidConfig(list(dict.fromkeys(found.problems)))
    except InvalidConfig as error:
        raise InvalidConfig([f"{path}: {each}" for each in error.problems]) from None
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
