"""Loading: a config from a TOML file and the command line.

`load_config` reads a file, puts `--section.key=value` overrides on top, and checks the values of every section; all
problems come in one InvalidConfig. `[model]` starts from the preset that `name` names. No torch.
"""

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from itertools import permutations
from pathlib import Path
from typing import Any

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import expand, find_path_problem
from dtlayout.config.config import Config
from dtlayout.config.new_rows import add_rows
from dtlayout.config.sections import TrainConfig
from dtlayout.models.beside import KEPT, TOKENIZER, has_other_tokenizer
from dtlayout.models.files import complete
from dtlayout.models.first_source import describe_missing, find_place, read_saved
from dtlayout.models.peft import find_base_folder, is_peft, read_adapter
from dtlayout.models.presets import PRESETS
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape

PLANNED_STEPS = 1_000_000_000
"""Number of steps of a plan that names none: more than any warm-up has."""
_EITHER = (("train", "steps", "epochs"), ("data", "source", "mixture"))
"""A section and two of its keys, of which each takes the place of the other."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a TOML file with `--section.key=value` overrides.

    InvalidConfig with a line for each unknown key and each value that cannot be. `check_layout` says whether the config
    can be trained.
    """
    return parse_config(_read_tables(path, overrides))


def load_plan(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a file that may leave out `train.steps`, for commands that only predict.

    Without them, and without `train.epochs`, the number of steps is PLANNED_STEPS.
    """
    tables = _read_tables(path, overrides)
    tables.setdefault("train", {})
    if isinstance(train := tables["train"], dict) and not train.get("epochs"):
        train.setdefault("steps", PLANNED_STEPS)
    return parse_config(tables)


def load_formats(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Key → value of [precision] in a config file, for the keys that are there."""
    return dict(_read_tables(path, overrides).get("precision", {}))


def read_sections(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Section → its keys in a config file, with `--section.key=value` overrides, as they are written."""
    tables = toml.read(path, "config")
    override(tables, overrides)
    return tables


def _read_tables(path: str | Path, overrides: Sequence[str]) -> dict[str, Any]:
    tables = read_sections(path, overrides)
    if isinstance(train := tables.get("train"), dict):
        train.setdefault("run_folder", f"runs/{Path(path).stem}")
    return tables


def parse_config(tables: dict[str, Any]) -> Config:
    """The config of parsed TOML; InvalidConfig with every problem."""
    problems = []
    try:
        model = _find_sizes(tables.get("model") or _name_source(tables.get("train")))
    except InvalidConfig as error:
        problems += error.problems
        model = asdict(PRESETS["debug"])  # so that the other sections are checked too
    try:
        adapter = _read_adapter(tables)
        model = {**model, "adapter": adapter} if adapter and isinstance(model, dict) else model
    except InvalidConfig as error:
        problems += error.problems
    tables = {name: table for name, table in tables.items() if name != "adapter"}
    try:
        tables = _choose_tokenizer(tables)
    except InvalidConfig as error:
        problems += error.problems
    if isinstance(model, dict):
        run_folder = str(_find_train(tables).get("run_folder", TrainConfig.run_folder))
        folder = _find_init_from(tables)
        folder = None if folder is None or is_peft(folder) else folder
        model = add_rows(model, tables, folder, expand(run_folder) if has_begun(run_folder) else None)
    sections = [f.name for f in fields(Config)]
    problems += [toml.describe_unknown_key(name, [*sections, "adapter"]) for name in tables if name not in sections]
    tables = {name: table for name, table in tables.items() if name in sections}
    needed: dict[str, Any] = {f.name: {} for f in fields(Config) if f.default_factory is MISSING}
    try:
        config = toml.parse({**needed, **tables, "model": model}, Config)
    except InvalidConfig as error:
        problems += error.problems
    if problems:
        raise InvalidConfig(list(dict.fromkeys(problems)))  # several sections may need one file
    return config


def _read_adapter(tables: Mapping[str, Any]) -> dict[str, Any] | None:
    """The [adapter] of the tables, with all of its keys, or that of a PEFT folder or run in `train.init_from`, if any.

    It is part of the model (`ModelShape.adapter`): it says which weights there are.
    """
    model = tables.get("model")
    if isinstance(model, dict) and model.get("adapter") is not None:
        raise InvalidConfig("model.adapter is a section of its own: write [adapter]")
    given = tables.get("adapter")
    if given is not None:
        return asdict(toml.parse(given, Adapter, "adapter"))
    folder = _find_init_from(tables)
    if folder is not None and (saved := read_saved(folder)) is not None:
        return None if saved.adapter is None else asdict(toml.parse(saved.adapter, Adapter, "adapter"))
    return asdict(read_adapter(folder)) if folder is not None and is_peft(folder) else None


def _find_init_from(tables: Mapping[str, Any]) -> Path | None:
    """The path of `train.init_from`; None without one, or where it can be no path."""
    named = _find_train(tables).get("init_from")
    return find_place(named) if isinstance(named, str) and named and not find_path_problem(named) else None


def _find_train(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table [train]; empty where it is none."""
    train = tables.get("train")
    return train if isinstance(train, dict) else {}


def override(tables: dict[str, Any], overrides: Sequence[str]) -> None:
    """Put each `--section.key=value` into the tables; a value that is no TOML is a string.

    `--layout=NAME` sets each key that a printed layout names. `--model=M` puts another model in the place of [model].
    `--train.steps` takes the place of `train.epochs` in the file, `--data.source` that of its `data.mixture`, and the
    other way round.
    """
    for text in overrides:
        key, equals, value = text.removeprefix("--").partition("=")
        if key == "layout" and equals:
            table = tables.get("layout", {})
            tables["layout"] = (table if isinstance(table, dict) else {}) | Layout.read(value)
            continue
        if key == "model" and equals:
            tables["model"] = {"name": value}
            continue
        section, dot, name = key.partition(".")
        if not (text.startswith("--") and equals and dot and section and name):
            raise InvalidConfig(f"{text!r} is not an override; write --section.key=value, such as --layout.tp=2")
        *path, last = key.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise InvalidConfig(f"{text!r} cannot be set: {key.rpartition('.')[0]} is no table in the config")
        table[last] = toml.parse_value(value)
    given = {text.removeprefix("--").partition("=")[0] for text in overrides}
    for section, *keys in _EITHER:
        table = tables.get(section)
        for name, other in permutations(keys):
            is_given = f"{section}.{name}" in given and f"{section}.{other}" not in given
            if is_given and isinstance(table, dict) and table[name]:
                table.pop(other, None)


def _name_source(train: Any) -> dict[str, Any]:
    """A [model] that is named by the folder of `train.init_from`, which has its sizes; of a run the sizes themselves.

    {} without such a folder. InvalidConfig if it has no config.json and no checkpoint.
    """
    init_from = train.get("init_from") if isinstance(train, dict) else None
    if not init_from:
        return {}
    place = find_place(str(init_from))
    if (saved := read_saved(place)) is not None:
        return dict(saved.model)
    folder = find_base_folder(place).absolute()  # whatever a preset is called
    if not os.path.isfile(folder / "config.json"):
        raise InvalidConfig(f"{describe_missing(str(init_from))}; and the config has no [model]")
    return {"name": str(folder)}


def has_begun(run_folder: str) -> bool:
    """Whether the folder of a run holds a checkpoint, from which the run would go on."""
    try:
        return any((expand(run_folder) / "checkpoints").glob("step-*"))
    except (OSError, ValueError, InvalidConfig):  # no path at all
        return False


def describe_kept_tokenizer(config: Config) -> list[str]:
    """A line if a run goes on, and so has the tokenizer of its own folder."""
    run_folder, tokenizer = config.train.run_folder, config.data.tokenizer
    if not has_begun(run_folder) or tokenizer not in _find_own_tokenizers(run_folder):
        return []
    return [
        f"{run_folder} has a checkpoint, so the run there goes on, with its own tokenizer: {tokenizer}; with another "
        f"train.run_folder a new one begins"
    ]


def _choose_tokenizer(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables with a `data.tokenizer`, where they name none and the model comes with one.

    A new run has the tokenizer of `train.init_from`. A run that has begun goes on with the tokenizer that its own
    config names or its folder has kept, or else with that of `train.init_from`. InvalidConfig if there is only a
    tokenizer of another form than tokenizer.json: the model's ids would mean other texts.
    """
    data, train = tables.get("data", {}), tables.get("train", {})
    if not isinstance(data, dict) or not isinstance(train, dict) or "tokenizer" in data:
        return tables
    init_from, run_folder = str(train.get("init_from", "")), str(train.get("run_folder", TrainConfig.run_folder))
    sources = _find_own_tokenizers(run_folder) if has_begun(run_folder) else []
    sources = [source for source in sources if source and not find_path_problem(source)]
    if (place := _find_init_from(tables)) is not None:
        saved = read_saved(place)
        sources += [str(place)] if saved is None else _find_own_tokenizers(str(saved.run))
        sources += [str(find_base_folder(place))] if is_peft(place) else []
    for source in sources:
        if source == "bytes" or os.path.isfile(expand(source)) or os.path.isfile(expand(source) / TOKENIZER):
            return {**tables, "data": {**data, "tokenizer": source}}
    for source in sources:
        if has_other_tokenizer(expand(source)):
            where = f"train.init_from={init_from!r}" if source == str(place) else source
            raise InvalidConfig(
                f"{where} has a tokenizer, but no {TOKENIZER}; save it with AutoTokenizer.from_pretrained(FOLDER)."
                f"save_pretrained(FOLDER), or name another one as data.tokenizer"
            )
    return tables


def _find_own_tokenizers(run_folder: str) -> list[str]:
    """Paths where a run's tokenizer may be: the one that its own config names, and the one in its folder."""
    kept = str(Path(run_folder, KEPT))
    try:
        said = toml.read(expand(run_folder) / "config.toml", "config")["data"]["tokenizer"]
    except (InvalidConfig, KeyError, TypeError):  # a run that was converted has none
        return [kept]
    return [str(said), kept]


def _find_sizes(table: Any) -> Any:
    """The table of [model], completed by the sizes of the model that it names; InvalidConfig if a size is missing."""
    if not isinstance(table, dict):
        return table
    with toml.problems_of("model.name"):
        table = complete(table)
    name = table.get("name")
    missing = [f.name for f in fields(ModelShape) if f.default is MISSING and f.name not in table]
    if missing:
        near = difflib.get_close_matches(str(name), PRESETS, n=1)
        advice = f"did you mean {near[0]}?" if near else f"use one of {', '.join(PRESETS)}."
        what = (
            "model.name is missing"
            if name is None
            else f"model.name={name!r} is no preset and no Hugging Face folder, config.json or TOML file"
        )
        raise InvalidConfig(f"{what}; {advice} A model of your own needs {', '.join(missing)} too")
    return table
