"""A plugin of pytest: writes which lines of some files the tests that it runs have reached, in any thread."""

import json
import os
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

WANTED, REACHED = "CUDA_LINES_OF", "CUDA_LINES_TO"
"""Variables of the environment: files whose lines are noted, one a line, and the file that gets what was reached."""
_lines: dict[str, set[int]] = {}


def _trace(frame: FrameType, event: str, argument: Any) -> Any:
    lines = _lines.get(frame.f_code.co_filename)
    if lines is None:
        return None

    def note(frame: FrameType, event: str, argument: Any) -> Any:
        lines.add(frame.f_lineno)
        return note

    return note


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """Note lines while a test runs, and not while modules are imported or fixtures are made."""
    threading.settrace(_trace)
    sys.settrace(_trace)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def pytest_sessionstart() -> None:
    """Read which files are wanted."""
    _lines.update({name: set() for name in os.environ[WANTED].splitlines()})


def pytest_sessionfinish() -> None:
    """Write what was reached."""
    Path(os.environ[REACHED]).write_text(json.dumps({name: sorted(lines) for name, lines in _lines.items()}))
