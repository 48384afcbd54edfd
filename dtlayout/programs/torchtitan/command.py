"""Commands that start torchtitan: their options, with those of the file or of the config of 0.3 that they name."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.command_line import count_ranks, find_command, read_options, split_program
from dtlayout.programs.files.trees import read_tree
from dtlayout.programs.shell.script import Command, Unknown
from dtlayout.programs.torchtitan.names import NAMED
from dtlayout.programs.understood import OtherFile, Row, Understood

MARK = re.compile(r"torchtitan[./][\w./]*train|run(_llama)?_train\.sh|--parallelism\.|--job\.config[_-]file")
"""Text of a script that starts torchtitan."""
_STARTS = re.compile(r"(.*[/.])?(torchtitan\.(experiments\.[\w.]+\.)?train|train\.py|run(_llama)?_train\.sh)")
_POLICY = re.compile(r"activation[-_]checkpoint:([a-z_-]+)")
"""Config modifier of 0.3, behind all options."""


def read_script(file: OtherFile, found: Understood) -> tuple[dict[str, Any], bool]:
    """Options of the last command that starts torchtitan, and True if it names a config of 0.3."""
    command = find_command(file, _starts_it)
    before, own = split_program(command.words, _starts_it)
    policies = [match[1] for word in own if (match := _POLICY.fullmatch(word))]
    read = read_options([word for word in own if not _POLICY.fullmatch(word)], found)
    options = dict(_name_option(name, value) for name, value in read.items())
    if policies:
        options["activation_checkpoint.mode"] = policies[-1].replace("-", "_")
    count_ranks(read_options(before, Understood("", "")), found)
    if command.passes_arguments:
        what = "options that the script itself is given are not known: --given @='…' says them"
        found.ignore('"$@"', what, "assumed")
    base, is_named = _find_base(options, _read_variables(command, file, found), file, found)
    return {**base, **options}, is_named


def rewrite(text: str, changes: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """A script's text with another config modifier, and the changes that its options say."""
    mode = changes.get("activation_checkpoint.mode")
    if mode is None or _POLICY.search(text) is None:
        return text, changes
    others = {name: value for name, value in changes.items() if name != "activation_checkpoint.mode"}
    return _POLICY.sub(f"activation-checkpoint:{str(mode).replace('_', '-')}", text), others


def _starts_it(word: str) -> bool:
    return _STARTS.fullmatch(word) is not None or word.startswith("--parallelism.")


def _name_option(name: str, value: Any) -> tuple[str, Any]:
    """An option of the command line as a file has it: with underscores, and --section.no-key as a key that is false."""
    name, value = name.replace("-", "_"), None if value == "None" else value
    return (name.replace(".no_", "."), False) if ".no_" in name and value is True else (name, value)


def _read_variables(command: Command, file: OtherFile, found: Understood) -> dict[str, str]:
    """Variables that run_train.sh reads, whose NGPU are the GPUs; none for another program."""
    if not any(word.endswith("_train.sh") for word in command.words):
        return {}
    said = {**command.variables, **file.given}
    gpus = str(said.get("NGPU", 8))
    found.num_gpus = found.gpus_per_node = int(gpus) if gpus.isdigit() else 0
    if "NGPU" not in said:
        found.ignore("NGPU", "run_train.sh starts 8 GPUs where nothing says it", "assumed")
    return said


def _find_base(
    options: dict[str, Any], said: Mapping[str, str], file: OtherFile, found: Understood
) -> tuple[Mapping[str, Any], bool]:
    """Values of the file or of the config that a command names, which is taken out of its options."""
    path, module = options.pop("job.config_file", said.get("CONFIG_FILE")), options.pop("module", said.get("MODULE"))
    name = options.pop("config", said.get("CONFIG"))
    for variable, value in (("CONFIG_FILE", path), ("CONFIG", None if path else name)):
        if isinstance(value, Unknown):
            how = f"--given {value.variable}=VALUE says it" if value.variable else "write it there"
            raise InvalidConfig(f"{variable} is {value}, {value.reason}: {how}")
    if path:
        return _read_file(str(path), file), False
    if name is None:
        if said:
            raise InvalidConfig(
                "run_train.sh is told no config: --given CONFIG_FILE=FILE or --given CONFIG=NAME says it"
            )
        return {}, False
    known = NAMED.get(name)
    if known is None or (module and str(module).rpartition(".")[2] != known["model.name"]):
        of = f" of --module {module}" if module else ""
        raise InvalidConfig(f"--config {name}{of} is in the program's code; known here are {', '.join(NAMED)}")
    found.rows.append(Row(f"--module {module or known['model.name']} --config {name}", "its values, below", "read"))
    return known, True


def _read_file(path: str, file: OtherFile) -> Mapping[str, Any]:
    """Values of a TOML file, beside the script or where this program was started."""
    for place in (file.path.parent / path, Path(path)):
        try:
            tree = read_tree(place.read_text(encoding="utf-8"), file.given)
        except (OSError, ValueError):
            continue
        if tree is not None:
            return tree.values
    raise InvalidConfig(f"the config file {path} is not there, beside the script or here; give it in its place")
