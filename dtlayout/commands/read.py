"""dtlayout read: what a file of another program says, in our own words, as a table and as a config."""

import argparse
from pathlib import Path
from typing import Any

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.base.files import write
from dtlayout.base.formatting import align, plural
from dtlayout.commands.arguments import add_given, add_world, show
from dtlayout.config.loading import parse_config
from dtlayout.programs.reading import READERS, parse_given, read_program
from dtlayout.programs.understood import Understood

EXAMPLE = "dtlayout read train.sh --given NNODES=8 --output job.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file, values of its variables, and the config to write."""
    parser.add_argument("file", type=Path, help="another program's file: " + ", ".join(each.title for each in READERS))
    add_given(parser)
    add_world(parser)
    parser.add_argument("--output", metavar="FILE", type=Path, help="our config of the job, which explain takes")


def run(options: argparse.Namespace) -> int:
    """Print how each option is understood; refuse a file that is not."""
    found = read_program(options.file, parse_given(options.given), options.world or 0)
    if found is None:
        known = ", ".join(each.title for each in READERS)
        raise InvalidConfig(f"{options.file} is no file of a program that is read here; read are {known}")
    if options.output:
        write(options.output, to_toml(found), "the config")
    document: dict[str, Any] = {
        "program": found.title, "engine": found.engine, "gpus": found.num_gpus, "tables": found.tables,
        "told": found.told, "options": [each._asdict() for each in found.rows],
        "contradictions": find_contradictions(found),
    }  # fmt: skip
    return show(options, document, lambda _: _list_lines(found, document["contradictions"]))


def find_contradictions(found: Understood) -> list[str]:
    """Reasons why no program could train with what a file says; none where it does not say all of a job."""
    if not found.num_gpus or not found.tables.get("model"):
        return []
    try:
        config = parse_config({**found.tables, "train": {"steps": 1}})
        return config.layout.resolve(found.num_gpus).problems(config.model, config.batch)
    except InvalidLayout as error:
        return error.problems
    except InvalidConfig:  # a number that is not said
        return []


def to_toml(found: Understood) -> str:
    """Our config of the job, with the program and its GPUs in the comments above it."""
    told = "".join(f" --engine-set {name}={value}" for name, value in found.told.items())
    gpus = f" --gpus {found.num_gpus}" if found.num_gpus else ""
    lines = [f"# A job of {found.title}: dtlayout explain FILE --engine {found.engine}{told}{gpus} --gpu NAME", ""]
    return "\n".join(lines) + toml.dumps({name: table for name, table in found.tables.items() if table})


def _list_lines(found: Understood, contradictions: list[str]) -> list[str]:
    words = {"read": "", "assumed": "assumed", "ignored": "not predicted", "no effect": "no effect"}
    rows = [
        (each.option or "(not said)", each.ours or "-", ": ".join(filter(None, (words[each.how], each.note))))
        for each in found.rows
    ]
    gpus = plural(found.num_gpus, "GPU") if found.num_gpus else "GPUs are not said: give --world"
    gpus += f", {found.gpus_per_node} a node" if found.num_gpus and found.gpus_per_node else ""
    lines = [f"{found.title}, {gpus}", "", *align([("option", "ours", ""), *rows], ("<", "<", "<"))]
    return [*lines, *[""] * bool(contradictions), *(f"contradicts itself: {each}" for each in contradictions)]
