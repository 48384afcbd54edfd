"""What `make test` leaves to `make test-all`: further combinations of what it tests in others.

A case that alone shows something, a schedule, an axis, a kernel, an error, never is one of them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def thorough(case: Any) -> Any:
    """A case of a parametrized test, a tuple where it has several parameters, for `make test-all` alone."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.thorough)


def mostly_thorough(cases: Iterable[Any], usual: Callable[[int, Any], bool] = lambda i, case: i % 2 == 0) -> list[Any]:
    """Cases of a parametrized test: by their place and themselves those of each test run, the others thorough."""
    return [case if usual(i, case) else thorough(case) for i, case in enumerate(cases)]
