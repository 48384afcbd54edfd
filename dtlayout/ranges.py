"""Ranges of a config's numbers: noted at each field, checked when a value is made."""

import math
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from typing import Any, ClassVar

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


class Ranged:
    """A section of a config, a dataclass: InvalidConfig with each `ranged` field that is outside its range."""

    section: ClassVar[str]

    def __init_subclass__(cls, section: str = "") -> None:
        """`section` is its name in the file; a class without one has that of its base."""
        cls.section = section or cls.section

    def __post_init__(self) -> None:
        numbers = [(f.name, getattr(self, f.name), f.metadata["rule"]) for f in fields(self) if "rule" in f.metadata]  # type: ignore[arg-type]
        problems = [f"{self.section}.{name}={value} {rule}" for name, value, rule in numbers if not _RULES[rule](value)]
        if problems:  # NaN is outside every range
            raise InvalidConfig(problems)
