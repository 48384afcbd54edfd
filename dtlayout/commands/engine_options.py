"""The program that is predicted: its arguments, and what a prediction assumes of it."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import wrap
from dtlayout.costmodel.engine import OWN_ENGINE, Engine, find_engine_on
from dtlayout.costmodel.scenario import Scenario
from dtlayout.spec.cluster import Gpu
from dtlayout.spec.precision import Precision


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the program, and what a run of it is told."""
    parser.add_argument("--engine", default=OWN_ENGINE, metavar="NAME", help="training program; %(default)s by default")
    parser.add_argument(
        "--engine-set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what a run of it is told, such as overlap_dp=false or cuda_graphs=full; may be repeated",
    )


def read_engine(options: argparse.Namespace, gpu: Gpu, formats: Mapping[str, str]) -> tuple[Engine, Precision]:
    """The engine of `add_engine` on a GPU type, told what it is told, and its precision with some formats named.

    InvalidConfig for what the engine does not have.
    """
    return find_engine_on(options.engine, gpu).told(_read_choices(options.engine_set)).told_formats(formats)


def _read_choices(texts: Sequence[str]) -> dict[str, str]:
    """Name of a choice → word; InvalidConfig for what is no NAME=VALUE, and for a name with two values."""
    asked: dict[str, str] = {}
    for text in texts:
        name, equals, word = text.partition("=")
        if not equals:
            raise InvalidConfig(f"--engine-set {text} is no NAME=VALUE, such as overlap_dp=false")
        if asked.setdefault(name, word) != word:
            raise InvalidConfig(f"--engine-set {name} has the values {asked[name]} and {word}: say one of them")
    return asked


def to_assumptions(scenario: Scenario) -> dict[str, Any]:
    """Assumptions of a prediction beside layout and kernels, and which of them a run can be told otherwise."""
    said = scenario.engine.assumptions(scenario.precision)
    return {"values": {name: value for name, (value, _) in said.items()}, "choices": scenario.engine.features.choices}


def describe_assumptions(engine: str, assumed: Mapping[str, Any]) -> Iterator[str]:
    """Lines with these assumptions."""
    yield from wrap(f"assumed of {engine}: ", [f"{name} {value}" for name, value in assumed["values"].items()])
    if choices := assumed["choices"]:
        yield from wrap("  --engine-set changes ", choices)
