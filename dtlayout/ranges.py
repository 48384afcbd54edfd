"""Ranges of a config's numbers, and paths that are none: noted at each field, checked when a value is made."""

import math
from collections.abc import Callable, Collection
from dataclasses import MISSING, field, fields
from typing import Any, ClassVar

from dtlayout.errors import InvalidConfig

_RULES: dict[str, Callable[[Any], bool]] = {
    "must be above 0": lambda value: value > 0,
    "must be above 0 and finite": lambda value: 0 < value < math.inf,
    "must not be negative": lambda value: 0 <= value < math.inf,
    "must be at least 0 and finite": lambda value: 0 <= value < math.inf,
    "must be at least 1": lambda value: 1 <= value < math.inf,
    "must be from 1 to a billion": lambda value: 1 <= value <= 10**9,
    "must lie between 0 and 1": lambda value: 0 <= value <= 1,
    "must lie between 0.5 and 1": lambda value: 0.5 <= value <= 1,
    "must be at least 0 and below 1": lambda value: 0 <= value < 1,
    "must be above 0 and at most 2592000, thirty days": lambda value: 0 < value <= 2_592_000,
    "must not be empty or hold a NUL": lambda value: bool(value.strip()) and "\0" not in value,
}


def ranged(rule: str, default: Any = MISSING) -> Any:
    """A dataclass field whose value obeys a rule of this module, such as "must be at least 1"."""
    return field(default=default, metadata={"rule": rule})


def one_of(choices: Collection[str] | Callable[[], Collection[str]], default: Any) -> Any:
    """A dataclass field whose value is one of these, or of what is there when it is asked."""
    return field(default=default, metadata={"choices": choices})


class Ranged:
    """A section of a config, a dataclass: InvalidConfig with each `ranged` field that is outside its range."""

    section: ClassVar[str]

    def __init_subclass__(cls, section: str = "") -> None:
        """`section` is its name in the file; a class without one has that of its base."""
        cls.section = section or cls.section

    def __post_init__(self) -> None:
        if problems := self.range_problems():
            raise InvalidConfig(problems)

    def range_problems(self) -> list[str]:
        """Each field that is outside its range, in a line; NaN is outside every one."""
        values = [(f.name, getattr(self, f.name), f.metadata["rule"]) for f in fields(self) if "rule" in f.metadata]  # type: ignore[arg-type]
        return [
            f"{self.section}.{name}={_quote(value)} {rule}" for name, value, rule in values if not _RULES[rule](value)
        ]


def _quote(value: Any) -> str:
    return repr(value) if isinstance(value, str) else str(value)
