"""What `make test` leaves to `make test-all`: further combinations of what it tests in others.

A case that alone shows something, a schedule, an axis, a kernel, an error, never is one of them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import pytest


def thorough(case: Any) -> Any:
    """A case of a parametrized test, a tuple where it has several parameters, for `make test-all` alone."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.thorough)


def mostly_thorough(cases: Iterable[Any], usual: Callable[[int, Any], bool] = lambda i, case: i % 2 == 0) -> list[Any]:
    """Cases of a parametrized test: by their place and themselves those of each test run, the others thorough."""
    return [case if usual(i, case) else thorough(case) for i, case in enumerate(cases)]


def cover(cases: Sequence[Any]) -> list[int]:
    """Places of few cases, dataclasses, that together have every value of every field which any case has."""
    every = [_list_values(case) for case in cases]
    left, chosen = set().union(*every), list[int]()
    while left:
        chosen.append(max(range(len(cases)), key=lambda i: len(every[i] & left)))
        left -= every[chosen[-1]]
    return sorted(chosen)


def _list_values(value: Any, name: str = "") -> set[tuple[str, Any]]:
    """Names of fields, those inside of others too, with their values."""
    if not is_dataclass(value):
        return {(name, value)}
    inside = (_list_values(getattr(value, each.name), f"{name}.{each.name}") for each in fields(value))
    return {(name, type(value))}.union(*inside)
