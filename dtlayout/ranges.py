"""Ranges of a config's numbers: noted at each field, checked when a value is made."""

import math
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from typing import Any

from dtlayout.errors import InvalidConfig

_RULES: dict[str, Callable[[float], bool]] = {
    "must be above 0": lambda value: value > 0,
    "must be above 0 and finite": lambda value: 0 < value < math.inf,
    "must not be negative": lambda value: 0 <= value < math.inf,
    "must be at least 1": lambda value: 1 <= value < math.inf,
    "must lie between 0 and 1": lambda value: 0 <= value <= 1,
}


def ranged(rule: str, default: Any = MISSING) -> Any:
    """A dataclass field whose number obeys a rule of this module, such as "must be at least 1"."""
    return field(default=default, metadata={"rule": rule})


def refuse_values(section: str, values: Any) -> None:
    """InvalidConfig with each `ranged` field of a dataclass that is outside its range; NaN is outside every one."""
    numbers = [(f.name, getattr(values, f.name), f.metadata["rule"]) for f in fields(values) if "rule" in f.metadata]
    problems = [f"{section}.{name}={value} {rule}" for name, value, rule in numbers if not _RULES[rule](value)]
    if problems:
        raise InvalidConfig(problems)
