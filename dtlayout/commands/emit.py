"""Emit: a recommended layout as a config that `dtlayout train` runs unchanged, or as another program's arguments."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import write
from dtlayout.commands.model_folder import ModelFolder, fit_rows
from dtlayout.config.checking import check_layout
from dtlayout.config.loading import parse_config
from dtlayout.costmodel.engine import OWN_ENGINE
from dtlayout.costmodel.estimate import Estimate
from dtlayout.costmodel.scenario import Scenario, request_kernels
from dtlayout.models.presets import PRESETS
from dtlayout.pipelining.partition import count_blocks, layer_costs, partition
from dtlayout.programs.program import Arguments, Job, Program
from dtlayout.programs.registry import PROGRAMS
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import AdamW
from dtlayout.spec.precision import Precision

_BYTES_VOCAB = 257
"""Number of ids of the bytes tokenizer, which needs no file."""
_STEPS = 100
_DECIDED = ("layout", "kernels", "batch", "cluster")
"""Sections that a recommendation decides, whatever the job's file says."""
MARK = "by dtlayout recommend."
"""Words in the first comment of each file, by which one of ours is known."""
_SAID_OF_LAYOUTS = ("pp", "dp_replicate", "dp_shard", "tp", "micro_batch", "zero", "recompute")


class Emitted(NamedTuple):
    """A file that was written for a program."""

    program: str
    """The program that takes it, with its version."""
    gaps: Sequence[str] = ()
    """Choices that the file cannot say, a sentence each."""
    is_script: bool = False
    """Whether the file is a shell script."""


def emit(
    path: Path,
    scenario: Scenario,
    estimate: Estimate,
    reasons: Sequence[str],
    sections: Mapping[str, Any] | None = None,
    folder: ModelFolder | None = None,
) -> Emitted:
    """Write the arguments of the program that the engine predicts for, with reasons as comments.

    A config of our own trainer where that is the program, or where nobody knows its arguments. `sections` are those of
    a config of ours whose job it is: what the layout does not decide is kept. `folder` has the model; our trainer
    starts from its weights. DtlayoutError if the file cannot be written, InvalidLayout or InvalidConfig for what the
    program would refuse.
    """
    if (program := PROGRAMS.get(scenario.engine.name)) is None:
        return _emit_config(path, scenario, estimate, reasons, sections or {}, folder)
    if (adapter := scenario.model.adapter) is not None:
        raise InvalidConfig(
            f"adapter.method={adapter.method}: arguments of {program.title} for an adapter are not written; "
            f"leave out --emit, or use --engine {OWN_ENGINE}"
        )
    arguments = program.write(Job(scenario, estimate, _STEPS))
    comments = [_name_scenario(scenario), *_describe_program(program, arguments, path), *reasons]
    first = [program.first_line] if program.first_line else []
    write(path, "\n".join([*first, *map(_comment, comments), "", *arguments.lines]) + "\n", "arguments")
    return Emitted(f"{program.title} {program.version}", arguments.gaps, program.first_line.startswith("#!"))


def _describe_program(program: Program, arguments: Arguments, path: Path) -> list[str]:
    gaps = [f"What they cannot say: {gap}." for gap in arguments.gaps]
    return [
        f"Arguments of {program.title} {program.version}; their names are those of {program.parser} there.", *gaps,
        f"Run it on each node: {arguments.start.replace('FILE', path.name)}",
        "The data are made up, to start with: put your own in their place.",
    ]  # fmt: skip


def _emit_config(
    path: Path,
    scenario: Scenario,
    estimate: Estimate,
    reasons: Sequence[str],
    kept: Mapping[str, Any],
    folder: ModelFolder | None,
) -> Emitted:
    """Check and write a config of our own trainer."""
    text = make_config(path, scenario, estimate, reasons, kept, folder)
    check_layout(parse_config(toml.loads(text)), scenario.cluster.num_gpus)
    write(path, text, "config")
    engine = scenario.engine.name
    foreign = [f"nobody knows the arguments of {engine}: this is a config of our own trainer"] * (engine != OWN_ENGINE)
    return Emitted(f"our own trainer, {OWN_ENGINE}", foreign)


def make_config(
    path: Path,
    scenario: Scenario,
    estimate: Estimate,
    reasons: Sequence[str],
    kept: Mapping[str, Any] = MappingProxyType({}),
    folder: ModelFolder | None = None,
) -> str:
    """A recommended layout as the text of a config file called `path`.

    `kept` are the sections of a config whose job it is; all but layout, kernels, batch and cluster stay. `folder` has
    the model of the scenario: the config starts from its weights and has its tokenizer, as far as it has them.
    """
    cluster, model = scenario.cluster, scenario.model
    model = fit_rows(model, estimate.layout.tp) if folder else model
    is_plain_cpu = cluster.gpu.device_type == "cpu" and not cluster.gpu.achieved
    per_node = cluster.num_gpus if is_plain_cpu else cluster.gpus_per_node  # its ranks are cores of one machine
    num_nodes = math.ceil(cluster.num_gpus / per_node)
    start = f"dtlayout train {path.name} --ranks {cluster.num_gpus}"
    if num_nodes > 1:
        ranks = f"--nnodes {num_nodes} --nproc-per-node {min(cluster.num_gpus, per_node)} --rdzv-endpoint HOST:PORT"
        start = f"torchrun {ranks} -m dtlayout.launch {path.name}, on each node"
    comments = [_name_scenario(scenario), *reasons]
    if (engine := scenario.engine.name) != OWN_ENGINE:
        comments.insert(
            1, f"Predicted for {engine}; what this trainer takes and needs, dtlayout check {path.name} says."
        )
    named, untaken = folder.name_sections(model) if folder else ({}, [])
    comments += untaken
    needs_tokenizer = model.vocab_size < _BYTES_VOCAB and not (folder and folder.has_tokenizer)
    if kept:
        comments.append("Model, data and all that no layout decides are those of the file that --like names.")
    used = estimate.kernels.used(request_kernels(scenario, estimate.layout))
    sections = {
        "model": named.get("model") or _list_sizes(model),
        "adapter": {} if model.adapter is None else asdict(model.adapter),
        "batch": asdict(scenario.batch),
        "layout": _changes(_cut_alike(scenario, estimate), Layout(), _SAID_OF_LAYOUTS),
        "kernels": {kernel.operation: kernel.name for kernel in used} | {"compile": estimate.kernels.compile},
        "precision": _changes(scenario.precision, Precision()),
        "optimizer": _changes(scenario.optimizer, AdamW()),
        "data": {
            "source": "python-stdlib",
            "tokenizer": "data/tokenizer.json" if needs_tokenizer else "bytes",
            "max_tokens": max(4_000_000, scenario.batch.num_tokens + 1),
            **named.get("data", {}),
        },
        "train": {"steps": _STEPS, **named.get("train", {})},
        "cluster": {"gpu": cluster.gpu.name, "gpus_per_node": per_node}
        | ({"file": cluster.file} if cluster.gpu.achieved else {}),  # what only predictions know
    }
    sections |= {name: dict(table) for name, table in kept.items() if name not in _DECIDED}
    sections["train"] |= {"device": cluster.gpu.device_type}
    small = "Small data that every machine has, to start with: put your own corpus and tokenizer here."
    bare = f"Bytes need {_BYTES_VOCAB} ids, the model has {model.vocab_size}: give a tokenizer of your own."
    if folder and folder.has_tokenizer:
        small = "Small data that every machine has, to start with: put your own corpus here."
    notes = {"data": bare if needs_tokenizer else small, "train": "A first run; raise steps for a real one."}
    beside = {name: [note] for name, note in notes.items() if name not in kept}
    if model.adapter is not None and "init_from" not in sections["train"]:
        lacks = "Without weights the frozen model is drawn at random: name their folder, and remove the #."
        beside["train"] = [*beside.get("train", ()), lacks, 'init_from = "FOLDER"']
    comments.append(f"Run it: {start}")
    lines = list(map(_comment, comments))
    for name, table in sections.items():
        if table:
            title, *values = toml.dumps({name: table}).splitlines()
            lines += ["", title, *(f"# {note}" for note in beside.get(name, ())), *values]
    return "\n".join(lines) + "\n"


def _name_scenario(scenario: Scenario) -> str:
    cluster = scenario.cluster
    return f"{scenario.model.name} on {cluster.num_gpus} x {cluster.gpu.name}, {MARK}"


def _comment(line: str) -> str:
    return "# " + "".join(c if c.isprintable() else " " for c in line)


def _list_sizes(model: ModelShape) -> dict[str, Any]:
    """The section [model]: what differs from the preset of this name, or all sizes if there is no preset.

    The file of a traced model says what its blocks compute. So a field that it leaves at its default is left out, and
    nobody reads of a gate that the model lacks.
    """
    known = PRESETS.get(model.name)
    sizes = _changes(model.base, known, ["name"])
    if known or not model.trace:
        return sizes
    defaults = {each.name: each.default for each in fields(ModelShape)}
    return {name: value for name, value in sizes.items() if value != defaults[name]}


def _changes(value: Any, default: Any, always: Sequence[str] = ()) -> dict[str, Any]:
    """Fields that differ from the default, and those in `always`; all fields if there is no default."""
    known = asdict(default) if default else {}
    return {k: v for k, v in asdict(value).items() if k in always or k not in known or v != known[k]}


def _cut_alike(scenario: Scenario, estimate: Estimate) -> Layout:
    """The layout; with `stage_layers` if the trainer would cut other stages by itself."""
    own = count_blocks(partition(layer_costs(scenario.model, scenario.batch), estimate.layout))
    is_same = own == estimate.stage_layers
    return estimate.layout if is_same else replace(estimate.layout, stage_layers=estimate.stage_layers)
