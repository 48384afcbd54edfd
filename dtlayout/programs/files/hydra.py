"""Commands whose program is Hydra's: the YAML that they name, and changes of its values, such as model.num_layers=4."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.command_line import find_command, split_program
from dtlayout.programs.files.trees import read_tree
from dtlayout.programs.files.yaml_files import load
from dtlayout.programs.shell.script import Command, Unknown
from dtlayout.programs.understood import OtherFile, Row, Understood

_CHANGE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.@-]*)(?:=(.*))?", re.DOTALL)
"""A change: a sign that adds or takes out, a dotted name, a value."""


def start_of(file: OtherFile, program: re.Pattern[str]) -> Command:
    """The last command of a script that starts the program; InvalidConfig without one, or if it may not run."""
    return find_command(file, lambda word: program.search(word) is not None)


def split_words(command: Command, program: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Words before the program, which start its ranks, and those behind it."""
    return split_program(command.words, lambda word: program.search(word) is not None)


def read_overrides(words: Sequence[str], found: Understood) -> dict[str, Any]:
    """Dotted name → value of each change among the words of a command; None for a name that is taken out.

    A word that is not known is a problem where it may hold changes.
    """
    values: dict[str, Any] = {}
    found.assigns = True
    for word in words:
        match = _CHANGE.fullmatch(word)
        if match is not None and (match[3] is not None or match[1] == "~"):
            value = match[3] or ""
            if isinstance(word, Unknown):
                values[match[2]] = Unknown(value, word.variable, word.reason)
            else:
                values.update(_spread(match[2], None if match[1] == "~" else _to_value(value)))
        elif isinstance(word, Unknown) and not word.startswith("-"):
            how = f"--given {word.variable}='…' says it, and may be empty" if word.variable else "write it out"
            found.problems.append(f"{word} may hold options, and is {word.reason}: {how}")
    return values


def _to_value(text: str) -> Any:
    try:
        return load(re.sub(r",(?=\S)", ", ", text) if text[:1] in "[{" else text)
    except ValueError:
        return text


def _spread(name: str, value: Any) -> Mapping[str, Any]:
    """Dotted name → value of a table, or of one value."""
    if not isinstance(value, Mapping) or not value:
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found.update(_spread(f"{name}.{key}", inner))
    return found


def find_file(options: Mapping[str, Any], file: OtherFile, found: Understood) -> Mapping[str, Any]:
    """Values of the YAML that --config-path and --config-name say, beside the script; none where they say nothing."""
    folder, name = (options.get(key) for key in ("config-path", "config-name"))
    for word in (folder, name):
        if isinstance(word, Unknown):
            raise InvalidConfig(f"the config file is {word}, {word.reason}: --given {word.variable}=FILE says it")
    if not name:
        return {}
    path = Path(str(folder or "conf")) / (str(name) if str(name).endswith(".yaml") else f"{name}.yaml")
    beside = file.path.parent / path.name
    values = find_values(path.name if beside.is_file() and not path.is_absolute() else path, file)
    found.rows.append(Row(f"--config-name {name}", "", "read", f"the values of {path}"))
    return values


def find_values(path: Any, file: OtherFile) -> Mapping[str, Any]:
    """Values of the YAML with that path, from the script; InvalidConfig if it is not there."""
    if isinstance(path, Unknown):
        raise InvalidConfig(f"the config file is {path}, {path.reason}: --given {path.variable}=FILE says it")
    place = Path(path) if Path(path).is_absolute() else file.path.parent / path
    try:
        tree = read_tree(place.read_text(encoding="utf-8"), file.given)
    except (OSError, ValueError):
        tree = None
    if tree is None:
        raise InvalidConfig(f"the config file {path} is not there, beside the script; give it in its place")
    return tree.values
