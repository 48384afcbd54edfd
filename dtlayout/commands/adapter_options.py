"""Options that give a model an adapter: `--adapter METHOD`, and `--adapter.KEY` for each other key of [adapter]."""

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import expand
from dtlayout.models.families import find_target_problems
from dtlayout.models.presets import PRESETS
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.model_shape import ModelShape

_METHODS = get_args(get_type_hints(Adapter)["method"])
_KEYS = tuple(each.name for each in fields(Adapter) if each.name != "method")


def add_adapter(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    text = f"{' or '.join(_METHODS)}: small weights are trained beside a frozen model"
    parser.add_argument("--adapter", metavar="METHOD", help=text)
    for key in _KEYS:
        parser.add_argument(f"--adapter.{key}", metavar="VALUE", help=f"{key} of [adapter], with --adapter")


def with_adapter(model: ModelShape, options: argparse.Namespace) -> ModelShape:
    """The model with the adapter that is asked for, or that its TOML file has; InvalidConfig for one that it cannot
    have."""
    given = {key: value for key in _KEYS if (value := getattr(options, f"adapter.{key}")) is not None}
    table = _read_section(options.model) if options.adapter is None else {"method": options.adapter}
    if table is None:
        if given:
            raise InvalidConfig(f"--adapter.{next(iter(given))} belongs to an adapter; give --adapter lora too")
        return model
    table = {**table, **{key: toml.parse_value(value) for key, value in given.items()}}
    adapted = replace(model, adapter=toml.parse(table, Adapter, "adapter"))
    if problems := find_target_problems(adapted):
        raise InvalidConfig(problems)
    return adapted


def _read_section(model: str) -> dict[str, Any] | None:
    """The [adapter] of a TOML file that names the model; None for a preset, another file, or one without it."""
    if model in PRESETS or Path(model).suffix != ".toml":
        return None
    found: dict[str, Any] | None = toml.read(expand(model), "model").get("adapter")
    return found
