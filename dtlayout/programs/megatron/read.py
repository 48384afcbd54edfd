"""Megatron-LM, read: the arguments of pretrain_gpt.py, in a shell script or alone, as our config."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.megatron.layout import read_stages as read_stages
from dtlayout.programs.megatron.options import FLAGS
from dtlayout.programs.megatron.reader import count_gpus, read_job
from dtlayout.programs.megatron.write import MEGATRON
from dtlayout.programs.shell.script import Command, Unknown, read_commands
from dtlayout.programs.understood import OtherFile, Understood


def read(file: OtherFile) -> Understood:
    """The job of a script or of a list of arguments; InvalidConfig with a line for each option that is not understood,
    or whose value the file alone does not say."""
    command = _find_command(file.text, file.given)
    found = Understood(MEGATRON.engine, MEGATRON.title)
    options, ranks = _split(command, found)
    count_gpus(found, ranks, file.num_gpus)
    read_job(found, options)
    if command.passes_arguments:
        found.ignore(
            '"$@"', "options that the script itself is given are not known: --given @='…' says them", "assumed"
        )
    return found


def is_ours(file: OtherFile) -> bool:
    """True for a text with arguments of Megatron-LM."""
    return "--num-layers" in file.text or "pretrain_gpt.py" in file.text


def _find_command(text: str, given: Mapping[str, str]) -> Command:
    """The last command with the model's sizes; of a list of arguments, which may have several lines, all of it.

    A word that holds a whole command, as behind eval or sh -c, is read like a script.
    """
    if text.lstrip().startswith("--"):
        text = text.replace("\n", " ")
    commands = read_commands(text, given)
    for command in commands:
        if len(commands) > 1 and command.words[0].startswith("--"):
            raise InvalidConfig(
                f"line {command.line}: a line break ends the command before {command.words[0]}; a backslash before it "
                f"goes on"
            )
    for command in reversed(commands):
        if any(_name(word) == "--num-layers" for word in command.words):
            if command.condition:
                raise InvalidConfig(
                    f"the command with --num-layers lies in {command.condition}; take it out, or give its words alone"
                )
            return command
        inner = " ".join(command.words[1:]) if command.words[0] == "eval" else ""
        inner = inner or next((word for word in command.words if " --num-layers" in word), "")
        if " --num-layers" in inner:
            return replace(_find_command(inner, given), line=command.line)
    if name := next(filter(None, (_find_yaml(command.words) for command in commands)), ""):
        raise InvalidConfig(f"--yaml-cfg {name} says everything: give that file, and its GPUs as --world N")
    raise InvalidConfig("no command of the script has --num-layers: give the script that says the model's sizes")


def _find_yaml(words: Sequence[str]) -> str:
    """The file of --yaml-cfg; empty where there is none."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if _name(word) == "--yaml-cfg":
            return word.partition("=")[2] or following
    return ""


def _name(word: str) -> str:
    return word.partition("=")[0]


def _split(command: Command, found: Understood) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Options with their values, and torchrun's options before the program's own.

    A word that is not known is a problem, unless it is the value of an option: it may be an option itself.
    """
    words = list(command.words)
    programs = [place for place, word in enumerate(words) if word.endswith(".py") and not word.startswith("-")]
    own, before = words[programs[-1] + 1 :] if programs else words, words[: programs[-1]] if programs else []
    return dict(_pair(own, found)), {name: " ".join(values) for name, values in _pair(before, None)}


def _pair(words: Sequence[str], found: Understood | None) -> Iterator[tuple[str, list[str]]]:
    name, values = "", list[str]()
    for word in words:
        if word.startswith("--"):
            if name:
                yield name, values
            name, _, value = word.partition("=")
            values = [value] if "=" in word else []
            if "=" in word and isinstance(word, Unknown):
                values = [Unknown(value, word.variable, word.reason)]
        elif isinstance(word, Unknown) and found is not None and (not name or values or name in FLAGS):
            how = f"--given {word.variable}='…' says it, and may be empty" if word.variable else "write it out"
            found.problems.append(f"{word} may hold options, and is {word.reason}: {how}")
        elif name:
            values.append(word)
    if name:
        yield name, values
