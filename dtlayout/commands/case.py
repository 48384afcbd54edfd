"""A case: a config as an engine is predicted to run it, for commands that explain or compare."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.commands.arguments import (
    MODELS,
    add_given,
    add_gpu,
    add_world,
    choose_gpu,
    choose_world,
    find_assumed_world,
    print_note,
)
from dtlayout.commands.engine_options import add_engine, read_engine
from dtlayout.config.checking import check_layout
from dtlayout.config.config import Config
from dtlayout.config.loading import PLANNED_STEPS, load_formats, load_plan, override, parse_config
from dtlayout.costmodel.engine import OWN_ENGINE, find_engine
from dtlayout.costmodel.scenario import Scenario, engine_kernels, find_unsupported
from dtlayout.models.traced import FAMILY, find_whole
from dtlayout.planner.prediction import own_scenario, predicted_kernels
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

if TYPE_CHECKING:  # what reads other programs' files takes a fourth of a command's start
    from dtlayout.programs.understood import Understood


class Case(NamedTuple):
    """The scenario, layout and kernels of one prediction."""

    scenario: Scenario
    layout: Layout
    kernels: Kernels


def add_machines(parser: argparse.ArgumentParser) -> None:
    """Add the GPUs and the engine that a config is predicted for."""
    add_gpu(parser)
    add_world(parser)
    add_engine(parser)
    add_given(parser)


def read_case(path: Path, overrides: Sequence[str], options: argparse.Namespace) -> Case:
    """The case of a config file, on the machines of `add_machines`; refused if the engine does not have the layout."""
    if (found := find_other(path, options)) is not None:
        return read_other(found, path, overrides, options)
    return make_case(load_plan(path, overrides), load_formats(path, overrides), options)


def find_other(path: Path, options: argparse.Namespace) -> "Understood | None":
    """The job that the file of another program says; None for a config of ours."""
    from dtlayout.programs.reading import parse_given, read_program  # only now, as above

    return read_program(path, parse_given(options.given), options.world or 0)


def read_other(
    found: "Understood", path: Path, overrides: Sequence[str], options: argparse.Namespace, *, notes: bool = True
) -> Case:
    """The case of a file of another program, predicted for that program, and on as many GPUs as it starts."""
    tables = found.tables
    override(tables, overrides)
    tables.setdefault("train", {}).update(steps=PLANNED_STEPS, epochs=0)
    _check_said(found, tables, path)
    asked = argparse.Namespace(**vars(options))
    if asked.engine == OWN_ENGINE:
        asked.engine = found.engine
    said = {each.partition("=")[0] for each in asked.engine_set}
    asked.engine_set = [*asked.engine_set, *(f"{k}={v}" for k, v in found.told.items() if k not in said)]
    asked.world = asked.world or found.num_gpus or None
    # Without cp a file names no method of it. A change to cp takes the program's usual one.
    methods = find_engine(asked.engine, "cpu").features.cp_methods
    tables.setdefault("layout", {}).setdefault("cp_method", methods[0])
    if notes:
        print_note(f"{path} is read as a job of {found.title}; dtlayout read shows how")
    return make_case(parse_config(tables), dict(tables.get("precision", {})), asked, notes=notes)


def read_as_ours(found: "Understood", path: Path, overrides: Sequence[str]) -> Config:
    """The config by which our own trainer runs the job of another program's file, with kernels of its own."""
    tables = {name: table for name, table in found.tables.items() if name != "kernels"}
    override(tables, overrides)
    tables.setdefault("train", {}).update(steps=1, epochs=0)
    _check_said(found, tables, path)
    print_note(f"{path} is a job of {found.title}; our own trainer takes it as dtlayout read shows")
    return parse_config(tables)


_NEEDED = {("batch", "seq_len"): "tokens of a sequence", ("batch", "global_batch"): "sequences of a step"}
"""Section and key that a prediction needs → what it says."""


def _check_said(found: "Understood", tables: Mapping[str, Any], path: Path) -> None:
    """InvalidConfig with a line for each number that a file of another program does not say."""
    model, missing = tables.get("model", {}), list[str]()
    if not model:
        missing.append(f"{path} does not say the sizes of the model: --model M does, with {MODELS}")
    elif "hidden_size" in model and "vocab_size" not in model:
        missing.append(
            f"{path} does not say the rows of the vocabulary, which its tokenizer may say: --model.vocab_size=N does"
        )
    perhaps = "" if found.num_gpus else ", and --world N may"
    missing += [
        f"{path} does not say the {what}: --{section}.{key}=N does{perhaps * (key == 'global_batch')}"
        for (section, key), what in _NEEDED.items()
        if key not in tables.get(section, {})
    ]
    if not found.num_gpus:
        missing.append(f"{path} does not say how many GPUs it starts: --world N does")
    if missing:
        raise InvalidConfig(missing)


def make_case(config: Config, formats: Mapping[str, str], options: argparse.Namespace, *, notes: bool = True) -> Case:
    """The case of a config, on the machines of `add_machines`; `formats` are those that its [precision] names.

    InvalidLayout if the engine does not have the layout. `notes` tells on stderr what is assumed.
    """
    scenario = make_scenario(config, formats, options)
    layout = _check(config, scenario)
    if notes:
        for note in (*find_assumed_world(config, options.world), *_find_ignored(scenario), *config.describe_ramp()):
            print_note(note)
    if scenario.engine.name == OWN_ENGINE:
        return Case(scenario, layout, predicted_kernels(config, layout, scenario.cluster.gpu))
    return Case(scenario, layout, engine_kernels(scenario, config.kernels, layout))


def make_scenario(config: Config, formats: Mapping[str, str], options: argparse.Namespace) -> Scenario:
    """The scenario of a config, on the machines of `add_machines`; `formats` are those that its [precision] names."""
    gpu = choose_gpu(config, options.gpu)
    scenario = own_scenario(config, choose_world(config, options.world), gpu)
    engine, precision = read_engine(options, gpu, formats)
    precision = scenario.precision if engine.name == OWN_ENGINE else precision
    return replace(scenario, engine=engine, precision=precision)


def find_misfits(config: Config, world_size: int) -> list[str]:
    """Reasons why the config's layout is none of so many GPUs with its model and its batch; empty if it is one."""
    try:
        return config.layout.resolve(world_size).problems(config.model, config.batch)
    except InvalidLayout as error:
        return error.problems


def _why_untrained(scenario: Scenario) -> str:
    """Reason why a traced model, such as a module of one's own, is predicted alone; empty where it is trained too."""
    return find_whole(scenario.model).get("training", "") if scenario.model.family == FAMILY else ""


def _find_ignored(scenario: Scenario) -> list[str]:
    """Notes on settings of the config that the engine's prediction ignores, and on a model that it does not train."""
    if scenario.engine.name == OWN_ENGINE and (why := _why_untrained(scenario)):
        return [f"{scenario.model.name} is predicted, not trained: {why}"]
    if scenario.document_mask and scenario.engine.features.sharding != "fsdp2":
        return [f"data.document_mask changes nothing that is predicted for {scenario.engine.name}"]
    return []


def _check(config: Config, scenario: Scenario) -> Layout:
    """The config's layout on the cluster; InvalidLayout if the engine does not have it."""
    if scenario.engine.name == OWN_ENGINE and not _why_untrained(scenario):
        return check_layout(config, scenario.cluster.num_gpus, scenario.device)
    layout = config.layout.resolve(scenario.cluster.num_gpus)
    layout.check(config.model, config.batch)
    if problems := find_unsupported(scenario, layout):
        raise InvalidLayout(problems)
    return layout
