"""Megatron-Bridge, read: a config that a run saves, a YAML of changes of a recipe, or a command, as our config.

A recipe is a function of its code. `bridge_recipes` has values of some, which a command or --given recipe=NAME names.
"""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import plural
from dtlayout.models.presets import PRESETS
from dtlayout.programs.command_line import count_ranks, read_options
from dtlayout.programs.files.hydra import find_values, read_overrides, split_words, start_of
from dtlayout.programs.megatron.own_names import Options, Said, change_as, find_own, read_names, translate
from dtlayout.programs.megatron.own_names import to_own as make_own
from dtlayout.programs.megatron.reader import IGNORED as MEGATRON_IGNORED
from dtlayout.programs.megatron.reader import read_job
from dtlayout.programs.megatron.write import MEGATRON
from dtlayout.programs.nemo.recipes import RECIPES, find_class, find_recipe, list_model, list_recipe
from dtlayout.programs.nemo.rules import IGNORED, NEUTRAL_BY_PART, OTHERWISE_BY_PART, At, list_rules
from dtlayout.programs.shell.script import Unknown
from dtlayout.programs.understood import OtherFile, Row, Understood

TITLE = "Megatron-Bridge"
_SCRIPT = re.compile(r"(^|/)(run_recipe\.py|train\.sh|run_recipe\.sh|pretrain_(?!gpt\.)\w+\.py)$")
"""A program of Megatron-Bridge."""
_CHANGES = re.compile(r"--(recipe|config[-_]file)\b|(model|train|optimizer|ddp|dataset|comm_overlap)\.\w+=")
"""Words that a command of it has."""
_ROOT = "ConfigContainer."
"""Name before those of a YAML of its benchmarks."""
_PARTS = (
    "model", "train", "optimizer", "ddp", "dist", "dataset", "tokenizer", "mixed_precision", "comm_overlap",
    "scheduler", "checkpoint", "logger", "rng", "profiling", "rerun_state_machine", "validation", "ft", "straggler",
    "nvrx_straggler", "tensor_inspect", "inprocess_restart", "optimizer_config_override_provider", "peft", "env_vars",
    "ENV_VARS", "_target_",
)  # fmt: skip
"""Parts of a config."""
_SPOKEN: Mapping[str, tuple[str, str]] = {
    "seq_length": ("dataset", "seq_length"), "sl": ("dataset", "seq_length"),
    "global_batch_size": ("train", "global_batch_size"), "gb": ("train", "global_batch_size"),
    "micro_batch_size": ("train", "micro_batch_size"), "mb": ("train", "micro_batch_size"),
    "tensor_model_parallel_size": ("model", "tensor_model_parallel_size"),
    "tp": ("model", "tensor_model_parallel_size"),
    "pipeline_model_parallel_size": ("model", "pipeline_model_parallel_size"),
    "pp": ("model", "pipeline_model_parallel_size"), "context_parallel_size": ("model", "context_parallel_size"),
    "cp": ("model", "context_parallel_size"), "lr": ("optimizer", "lr"), "min_lr": ("optimizer", "min_lr"),
}  # fmt: skip
"""Option of a command → part and field that it says."""
_SHORT = ("sl", "gb", "mb", "tp", "pp", "cp", "ms")
"""Options of a command behind one dash."""
_STARTS = re.compile(
    r"nodes|gpus-per-node|account|partition|container-image|mode|dataset|step.func|max_steps|ms|warmup_iters|save_.*"
    r"|pretrained_checkpoint|mount|env|srun-arg|additional-.*|time.*|job.*|hf_path|config.file|model|nproc.*"
)
"""Options of a command that start it."""
_OTHER_PARTS = {
    "checkpoints": r"checkpoint(_config)?(\..*)?",
    "the course of the learning rate": r"scheduler(_config)?(\..*)?|optimizer_config_override_provider(\..*)?",
    "logs and evaluation": r"(logger|profiling|validation|tensor_inspect)(_config)?(\..*)?",
    "initial values and chance": r"rng(_config)?(\..*)?", "its surroundings": r"(env_vars|ENV_VARS)(\..*)?",
    "what runs when it fails": r"(ft|straggler|nvrx_straggler|inprocess_restart|rerun_state_machine)(_config)?(\..*)?",
}  # fmt: skip
_MARKS = re.compile(
    r"(model|model_config)\.\w+_parallel_size|(train|train_config)\.train_(iters|samples)|dataset\.seq(uence)?_length"
    r"|(ddp|ddp_config|comm_overlap|mixed_precision|dist)(\..*)?"
)
"""Names of which a config of Megatron-Bridge has one."""
_CLASSES = r"(?!peft)(.*\.)?_(target|call|args|partial|name)_"
"""Names of classes and of how they are made."""


def is_ours(file: OtherFile) -> bool:
    """True for YAML with the parts of a config of Megatron-Bridge, and for a command that starts a recipe."""
    if file.tree is None:
        words = [word.strip("'\"\\") for word in file.text.split()]
        return any(map(_SCRIPT.search, words)) and any(map(_CHANGES.match, words))
    if file.tree.language != "yaml":
        return False
    names = [name.removeprefix(_ROOT) for name in file.tree.values]
    parts = {name.partition(".")[0].removesuffix("_config") for name in names}
    if str(file.tree.values.get("_target_")).startswith("megatron.bridge."):
        return True
    steps = re.compile(r"train(_config)?\.(micro_batch_size|global_batch_size|train_iters|train_samples)")
    is_known = parts <= {*_PARTS, "perf_matrix"} and any(map(steps.fullmatch, names))
    return is_known and any(map(_MARKS.fullmatch, names))


def read(file: OtherFile) -> Understood:
    """The job of such a file or command; what is not understood is in its `problems`, or an InvalidConfig."""
    found = Understood(MEGATRON.engine, TITLE)
    recipe: Any = file.given.get("recipe")
    values = file.tree.values if file.tree is not None else {}
    if file.tree is None:
        values, named = _read_command(file, found)
        recipe = recipe or named
    at = _find_names(values)
    known = _list_known(recipe, at, values, found)
    merged = {**known, **values}
    rules = list_rules(at, lambda part: has_part(merged, at, part))
    said = translate(rules, merged, found.problems)
    if "--hidden-size" not in said.options:
        raise InvalidConfig(
            f"the file changes a recipe, which is in the program's code: --given recipe=NAME says it, with one of "
            f"{', '.join(f'{name}_pretrain_config' for name in RECIPES)}; or give the config that a run saves"
        )
    count_said_gpus(said, at, found, file.num_gpus)
    read_job(found, said.options, said)
    note_names(said, at, found, _OTHER_PARTS)
    mark_known(found, values, f"of recipe {recipe}" if recipe else "of that class")
    if file.tree is not None:
        name, num_gpus = at("comm_overlap", "data_parallel_size"), found.num_gpus

        def find(options: Options) -> tuple[dict[str, Any], list[str]]:
            own, lost = find_own(rules, options, values, MEGATRON_IGNORED.values())
            ranks = _count_ranks_of_model(options)
            is_said = name in values and ranks and num_gpus and len(options) > 1
            return own | ({name: num_gpus // ranks} if is_said else {}), lost

        change_as(found, values, find)
    return found


def to_own(options: Options, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Dotted name → value of Megatron-Bridge's YAML that says options of Megatron-LM; None takes one out.

    It is the inverse of what `read` makes of such names. `values` are those of the file. InvalidConfig for what the
    program has no name for.
    """
    values = values or {}
    at = _find_names(values)
    rules = list_rules(at, lambda part: has_part(values, at, part))
    return make_own(rules, options, values, MEGATRON_IGNORED.values())


def has_part(values: Mapping[str, Any], at: At, part: str) -> bool:
    """True if a file has a part of a config as a table."""
    return any(name.startswith(f"{at(part, '')}.") for name in values)


def _find_names(values: Mapping[str, Any]) -> At:
    """Function that says dotted names as a file has them: below ConfigContainer, or with the endings of 0.1."""
    root = _ROOT if any(name.startswith(_ROOT) for name in values) else ""
    older = any(name.startswith(("model_config.", "train_config.")) for name in values)

    def at(part: str, field: str) -> str:
        name = f"{root}{part}_config" if older else f"{root}{part}"
        return f"{name}.{field}" if field else name

    return at


def _list_known(recipe: Any, at: At, values: Mapping[str, Any], found: Understood) -> dict[str, Any]:
    """Values of a recipe, or sizes of the class that the file names for its model."""
    if recipe is not None:
        if isinstance(recipe, Unknown):
            raise InvalidConfig(f"the recipe is {recipe}, {recipe.reason}: --given {recipe.variable}=NAME says it")
        if (known := find_recipe(str(recipe))) is None:
            names = ", ".join(f"{name}_pretrain_config" for name in RECIPES)
            raise InvalidConfig(
                f"recipe {recipe} is in the program's code; {names} are known here; or give the config that a run saves"
            )
        if not any(row.option == f"--recipe {recipe}" for row in found.rows):
            found.rows.append(Row(f"recipe {recipe}", "", "read", "the values of that name"))
        listed = list_recipe(known)
        if at("dataset", "sequence_length") in values:
            listed.pop(("dataset", "seq_length"))
        return {at(*name): value for name, value in listed.items() if at(name[0], "") not in values}
    return list_class(at, values, found)


def list_class(at: At, values: Mapping[str, Any], found: Understood) -> dict[str, Any]:
    """Sizes of the class that a file names for its model, where it does not say them itself."""
    name = at("model", "_target_")
    preset = find_class(values.get(name))
    if preset is None or at("model", "hidden_size") in values:
        return {}
    found.rows.append(Row(f"{name} = {values[name]}", "", "read", "the sizes of that class"))
    return {at("model", field): value for field, value in list_model(PRESETS[preset]).items()}


def mark_known(found: Understood, values: Mapping[str, Any], note: str) -> None:
    """Mark rows whose names a file does not have, which its recipe or a class says; take out those that say nothing."""
    rows = list[Row]()
    for row in found.rows:
        names = re.findall(r"([\w.\[\]]+) = ", row.option)
        is_known = bool(names) and not any(name in values for name in names)
        if not is_known:
            rows.append(row)
        elif row.ours or row.how == "assumed":
            rows.append(row._replace(note=row.note or note))
    found.rows = rows


def count_said_gpus(said: Said, at: At, found: Understood, num_gpus: int) -> None:
    """Note the GPUs of a config that a run has saved, which knows its data parallelism."""
    name = at("comm_overlap", "data_parallel_size")
    dp = str(said.values.get(name))
    if dp.isdigit() and not found.num_gpus and (ranks := _count_ranks_of_model(said.options)):
        found.num_gpus = int(dp) * ranks
        found.rows.append(Row(said.show(name), plural(found.num_gpus, "GPU"), "read"))
    found.num_gpus = num_gpus or found.num_gpus


def _count_ranks_of_model(options: Options) -> int:
    """Ranks with one copy of the model; 0 if the options do not say it."""
    degrees = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    words = [str((options.get(f"--{degree}") or ["1"])[0]) for degree in degrees]
    return prod(map(int, words)) if all(word.isdigit() for word in words) else 0


def note_names(said: Said, at: At, found: Understood, others: Mapping[str, str]) -> None:
    """Note the names that have no row yet, part by part."""
    ignored = {what: rf"({re.escape(_ROOT)})?({names})" for what, names in others.items()}
    neutral, otherwise = {}, list[str]()
    for part, subjects in IGNORED.items():
        for what, names in subjects.items():
            before = ignored.get(what)
            own = rf"{_pattern(at, part)}({names})"
            ignored[what] = f"{before}|{own}" if before else own
    for part, names in OTHERWISE_BY_PART.items():
        otherwise.append(rf"{_pattern(at, part)}({names})")
    for part, fields in NEUTRAL_BY_PART.items():
        neutral.update({at(part, name): known for name, known in fields.items()})
    ignored["classes of its code"] = _CLASSES
    read_names(found, said, ignored, "|".join(otherwise), neutral)


def _pattern(at: At, part: str) -> str:
    """Pattern of the beginning of a part's names, wherever its fields lie."""
    fields = ("other", "tensor_model_parallel_size")
    marks = {at(part, field).removesuffix(field) for field in fields}
    return "(" + "|".join(re.escape(mark) for mark in sorted(marks)) + ")"


# Commands


def _read_command(file: OtherFile, found: Understood) -> tuple[Mapping[str, Any], Any]:
    """Values that a command changes, with those of the YAML that it names, and its recipe."""
    command = start_of(file, _SCRIPT)
    before, own = split_words(command, _SCRIPT)
    changes = read_overrides(own, found)
    options = read_options([word for word in own if "=" not in word or word.startswith("-")], found)
    count_ranks(read_options(before, found), found)
    nodes, gpus = options.get("nodes"), options.get("gpus-per-node")
    if gpus is not None:
        count_ranks({"nnodes": nodes or "1", "nproc_per_node": gpus}, found)
    path = options.get("config-file") or options.get("config_file")
    values: dict[str, Any] = dict(find_values(path, file)) if path else {}
    at = _find_names({**values, **changes})
    for name, value in options.items():
        shown = f"{'-' if name in _SHORT else '--'}{name} {value}"
        if name in _SPOKEN:
            values[at(*_SPOKEN[name])] = value
            found.rows.append(Row(shown, "", "read", f"it is {at(*_SPOKEN[name])}"))
        elif name == "recipe":
            found.rows.append(Row(shown, "", "read", "the values of that name"))
        elif _STARTS.fullmatch(name):
            found.ignore(shown, "about how it is started")
        elif name == "peft_scheme" and str(value).lower() in ("none", "null"):
            found.ignore(shown, "its default", "no effect")
        else:
            found.problems.append(f"--{name} is not understood here; without it the rest can be predicted")
    recipe = options.get("recipe")
    if recipe is None and options.get("model"):
        recipe = f"{options['model']}_{options.get('mode', 'pretrain')}_config"
    if recipe is None:
        program = next(word for word in reversed(command.words) if _SCRIPT.search(word))
        recipe = f"{Path(program).stem.removeprefix('pretrain_')}_pretrain_config"
    return {**values, **changes}, recipe
