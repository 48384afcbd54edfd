"""Fixtures of the tests of commands."""

import pytest


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal in which nothing is folded, so that tests look for whole sentences."""
    monkeypatch.setenv("COLUMNS", "1000")
