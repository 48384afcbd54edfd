"""Reading: files of other programs as jobs of ours; a further program is a row of `READERS`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.automodel import read as read_automodel
from dtlayout.programs.automodel.write import AUTOMODEL
from dtlayout.programs.files.trees import read_tree
from dtlayout.programs.hugging_face import (
    accelerate,
    axolotl,
    deepspeed,
    llama_factory,
    read_accelerate,
    read_axolotl,
    read_deepspeed,
    read_llama_factory,
    read_trainer_script,
    read_trl,
    trl,
)
from dtlayout.programs.megatron import read as read_megatron
from dtlayout.programs.megatron import read_flagscale, read_yaml_cfg
from dtlayout.programs.megatron.write import MEGATRON
from dtlayout.programs.nanotron import read as read_nanotron
from dtlayout.programs.nanotron.write import NANOTRON
from dtlayout.programs.nemo import read_bridge, read_nemo1, read_nemo2
from dtlayout.programs.program import Job
from dtlayout.programs.torchtitan import read as read_torchtitan
from dtlayout.programs.torchtitan.write import TORCHTITAN
from dtlayout.programs.understood import ChooseOptions, OtherFile, Understood

ToOwn = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
"""Function from options of a program, and the values of a file, to names and values of the file; None takes one out."""


class FileReader(NamedTuple):
    """Reader of one program's files."""

    title: str
    """Files that it reads, for people."""
    is_ours: Callable[[OtherFile], bool]
    """True for such a file."""
    read: Callable[[OtherFile], Understood]
    """Job of such a file. What is not understood is in its `problems`, or an InvalidConfig."""
    options: ChooseOptions | None = None
    """Function by which the program says a layout, as `Program.options`."""
    together: tuple[frozenset[str], ...] = ()
    """Options that say one thing together, as `Program.together`."""
    to_own: ToOwn | None = None
    """Function from these options, and the values of a file, to the file's own names and values."""


_MEGATRON: dict[str, Any] = {"options": MEGATRON.options, "together": MEGATRON.together}
READERS = (
    FileReader("YAML of FlagScale or of Megatron-LM's options", read_flagscale.is_ours, read_flagscale.read,
               to_own=read_flagscale.to_own, **_MEGATRON),
    FileReader("YAML or a command of NeMo 1", read_nemo1.is_ours, read_nemo1.read, to_own=read_nemo1.to_own,
               **_MEGATRON),
    FileReader("YAML or a command of NeMo 2", read_nemo2.is_ours, read_nemo2.read, to_own=read_nemo2.to_own,
               **_MEGATRON),
    FileReader("YAML or a command of Megatron-Bridge", read_bridge.is_ours, read_bridge.read,
               to_own=read_bridge.to_own, **_MEGATRON),
    FileReader("YAML for Megatron-LM's --yaml-cfg", read_yaml_cfg.is_ours, read_yaml_cfg.read,
               to_own=read_yaml_cfg.to_own, **_MEGATRON),
    FileReader("a script of Megatron-LM", read_megatron.is_ours, read_megatron.read, **_MEGATRON),
    FileReader("a TOML file or a command of torchtitan", read_torchtitan.is_ours, read_torchtitan.read,
               TORCHTITAN.options),
    FileReader("a YAML file of nanotron", read_nanotron.is_ours, read_nanotron.read, NANOTRON.options),
    FileReader("a YAML file or a command of NeMo AutoModel", read_automodel.is_ours, read_automodel.read,
               AUTOMODEL.options),
    FileReader("DeepSpeed's JSON", read_deepspeed.is_ours, read_deepspeed.read, deepspeed.choose_options),
    FileReader("accelerate's YAML", read_accelerate.is_ours, read_accelerate.read, accelerate.choose_options),
    FileReader("a YAML file or a command of axolotl", read_axolotl.is_ours, read_axolotl.read,
               axolotl.choose_options, (frozenset({"batch_size", "gradient_accumulation_steps"}),)),
    FileReader("a YAML file or a command of LLaMA-Factory", read_llama_factory.is_ours, read_llama_factory.read,
               llama_factory.choose_options),
    FileReader("a YAML file or a command of TRL", read_trl.is_ours, read_trl.read, trl.choose_options),
    FileReader("a command of Hugging Face's Trainer", read_trainer_script.is_ours, read_trainer_script.read,
               read_trainer_script.choose_options),
)  # fmt: skip
"""Readers, of which the first takes a file that is its own."""


def read_program(path: Path, given: Mapping[str, str], num_gpus: int = 0) -> Understood | None:
    """The job of another program's file; None for a config of ours, or where nothing can be read.

    `num_gpus` take the place of those that the file starts; 0 leaves them. InvalidConfig with a line for each option
    that is not understood.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
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
    found.file = file
    _add_changes(found, reader)
    return found


def _add_changes(found: Understood, reader: FileReader) -> None:
    """Note how a file that was read is changed."""
    if found.options is not None:  # the reader knows better
        return
    options, to_own = reader.options, reader.to_own
    if options is None or to_own is None:
        found.options, found.together = options, reader.together
        return
    tree = found.file.tree if found.file else None
    values = found.values = found.own if tree is None else tree.values

    def choose(job: Job) -> tuple[dict[str, Any], list[str]]:
        chosen, gaps = options(job)
        return to_own(chosen, values), gaps

    found.options = choose
    found.together = [frozenset(_name_own(names, to_own, values)) for names in reader.together]


def _name_own(names: Iterable[str], to_own: ToOwn, values: Mapping[str, Any]) -> Iterator[str]:
    """The file's own names of some options; those that it has no name for are left out."""
    for name in names:
        with suppress(InvalidConfig):
            yield from to_own({name: None}, values)


def parse_given(texts: list[str]) -> dict[str, str]:
    """Variable → value, of texts such as TP=4; InvalidConfig for others."""
    found = dict[str, str]()
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise InvalidConfig(f"--given {text} is no NAME=VALUE, such as TP=4")
        found[name] = value
    return found
