"""Command lines of programs whose options are --name value: one command of a script, and the values of its options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.shell.script import Command, Unknown, read_commands
from dtlayout.programs.understood import OtherFile, Understood


def find_command(file: OtherFile, is_ours: Callable[[str], bool]) -> Command:
    """The last command of a script with a word that `is_ours`; InvalidConfig without one, or if it may not run.

    A word that holds a whole command, as behind eval or sh -c, is read like a script.
    """
    lines = file.text.replace("\n", " ") if file.text.lstrip().startswith("--") else file.text
    for command in reversed(read_commands(lines, file.given)):
        found = _find_inner(command, file, is_ours)
        if any(is_ours(word) for word in found.words):
            if lies_in := command.condition or found.condition:
                raise InvalidConfig(f"the command lies in {lies_in}; take it out, or give its words alone")
            return found
    raise InvalidConfig("no command of the script starts the program")


def _find_inner(command: Command, file: OtherFile, is_ours: Callable[[str], bool]) -> Command:
    """The command inside of a word, with the variables of the one outside; that one where no word holds any."""
    is_evaluated = command.words[0] == "eval"
    if not is_evaluated and any(is_ours(word) for word in command.words if " " not in word):
        return command
    for text in [" ".join(command.words[1:])] if is_evaluated else command.words:
        if " " in text and any(is_ours(word) for word in text.split()):
            for found in reversed(read_commands(text, file.given)):
                if any(is_ours(word) for word in found.words):
                    return replace(found, line=command.line, variables={**command.variables, **found.variables})
    return command


def split_program(words: Sequence[str], is_program: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """Words before a program's own file or module, which start its ranks, and those behind it."""
    places = [place for place, word in enumerate(words) if not word.startswith("-") and is_program(word)]
    if not places:
        return [], list(words)
    return list(words[: places[-1]]), list(words[places[-1] + 1 :])


def read_options(words: Sequence[str], found: Understood) -> dict[str, Any]:
    """Name without its dashes → value of each option: true for a flag, a list for several words.

    A word that is not known is a problem where it may hold options.
    """
    options: dict[str, Any] = {}
    name, values = "", list[str]()
    for word in [*words, "--"]:
        if word.startswith("-") and not _is_number(word):
            if name:
                options[name] = values[0] if len(values) == 1 else values or True
            name, equals, value = word.lstrip("-").partition("=")
            kept = Unknown(value, word.variable, word.reason) if isinstance(word, Unknown) else value
            values = [kept] if equals else []
        elif isinstance(word, Unknown) and (not name or values):
            how = f"--given {word.variable}='…' says it, and may be empty" if word.variable else "write it out"
            found.problems.append(f"{word} may hold options, and is {word.reason}: {how}")
        elif name:
            values.append(word)
    return options


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def count_ranks(options: Mapping[str, Any], found: Understood) -> None:
    """Note the GPUs that torchrun's options start, where they say them."""
    names = {name.replace("-", "_"): value for name, value in options.items()}
    per_node, nodes = (str(names.get(name, "")) for name in ("nproc_per_node", "nnodes"))
    if per_node.isdigit():
        found.gpus_per_node = int(per_node)
        known = nodes.isdigit() or "nnodes" not in names
        found.num_gpus = int(per_node) * int(nodes or 1) if known else 0
