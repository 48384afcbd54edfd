"""Rules for the numbers and paths of a config: noted at each field, checked when a section is made."""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, field, fields
from typing import Any, ClassVar

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.files import expand, find_path_problem
from dtlayout.base.formatting import shorten
from dtlayout.base.refusals import Refusal, refuse

_RULES: dict[str, Callable[[Any], bool]] = {
    "must be above 0": lambda value: value > 0,
    "must be above 0 and finite": lambda value: 0 < value < math.inf,
    'must be above 0 and finite, or "size"': lambda value: value == "size" or 0 < value < math.inf,
    "must not be negative": lambda value: 0 <= value < math.inf,
    "must be at least 0 and finite": lambda value: 0 <= value < math.inf,
    "must be at least 1": lambda value: 1 <= value < math.inf,
    "must be from 1 to a billion": lambda value: 1 <= value <= 10**9,
    "must be from 0 to a billion": lambda value: 0 <= value <= 10**9,
    "must be from 1 to a million": lambda value: 1 <= value <= 10**6,
    "must be from 1 to 10,000": lambda value: 1 <= value <= 10**4,
    "must lie between 0 and 1": lambda value: 0 <= value <= 1,
    "must lie between 0.5 and 1": lambda value: 0.5 <= value <= 1,
    "must be at least 0 and below 1": lambda value: 0 <= value < 1,
    "must be above 0 and at most 2592000, thirty days": lambda value: 0 < value <= 2_592_000,
    "must be of letters, digits, -, _ and .": lambda value: re.fullmatch(r"[\w.-]+", value) is not None,
    "must not be empty or hold a NUL": lambda value: bool(value.strip()) and "\0" not in value,
}
_TAKES_INFINITY = {"must be above 0"}


def ranged(rule: str, default: Any = MISSING) -> Any:
    """A dataclass field whose value obeys a rule of this module, such as "must be at least 1"."""
    return field(default=default, metadata={"rule": rule})


def path_key(default: Any = MISSING) -> Any:
    """A dataclass field with the text of a path, whose `~` is a home; it may be empty if its default is."""
    return field(
        default=default,
        metadata={"path": True} | ({"rule": "must not be empty or hold a NUL"} if default != "" else {}),
    )


def one_of(choices: Collection[str] | Callable[[], Collection[str]], default: Any) -> Any:
    """A dataclass field whose value is one of `choices`, or of those that `choices` returns when it is checked."""
    return field(default=default, metadata={"choices": choices})


class Ranged:
    """A section of a config, a dataclass: InvalidConfig with each `ranged` field that is outside its range.

    If all ranges are kept, InvalidConfig with a line for each of `find_broken`.
    """

    section: ClassVar[str]

    def __init_subclass__(cls, section: str = "") -> None:
        """`section` is the section's name in the file; a class without one has that of its base."""
        cls.section = section or cls.section

    def __post_init__(self) -> None:
        if problems := self.range_problems():
            raise InvalidConfig(problems)
        refuse(self.find_broken())
        self.expand_paths()

    def find_broken(self) -> list[Refusal]:
        """A refusal for each rule that values break although their ranges are kept; a section overrides this."""
        return []

    def expand_paths(self) -> None:
        """Replace the `~` of each path by a home, so that code that reads the field need not think of it."""
        for each in fields(self):  # type: ignore[arg-type]
            if each.metadata.get("path") and (text := getattr(self, each.name)).startswith("~"):
                object.__setattr__(self, each.name, str(expand(text)))

    def range_problems(self) -> list[str]:
        """A line for each field outside its range; NaN is outside every range, and infinity outside all but one."""
        found = [(each.name, getattr(self, each.name), each.metadata) for each in fields(self)]  # type: ignore[arg-type]
        told = [(name, value, _find_problem(value, metadata)) for name, value, metadata in found]
        return [f"{self.section}.{name}={_quote(value)} {problem}" for name, value, problem in told if problem]


def _find_problem(value: Any, metadata: Mapping[str, Any]) -> str:
    """Reason why a field's value is wrong; empty if it is right."""
    rule = metadata.get("rule", "")
    if rule and not _RULES[rule](value):
        return str(rule)
    if isinstance(value, float) and not math.isfinite(value) and rule not in _TAKES_INFINITY:
        return "must be a finite number"
    return find_path_problem(value) if metadata.get("path") else ""


def _quote(value: Any) -> str:
    return shorten(repr(value) if isinstance(value, str) else str(value))
