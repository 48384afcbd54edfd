"""SideQuestion: something that `dtlayout explain` may be asked beside the layout; a further one is a file and a row."""

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dtlayout.commands.arguments import JsonDocument
from dtlayout.commands.case import Case
from dtlayout.planner.explain import Explanation
from dtlayout.programs.understood import Understood


class Asked(NamedTuple):
    """A prediction about which something is asked."""

    options: argparse.Namespace
    """Options of the command, with its config and overrides."""
    case: Case
    explanation: Explanation
    found: Understood | None
    """Understanding of another program's file; None for a config of ours."""


class SideQuestion(NamedTuple):
    """Something that may be asked."""

    add: Callable[[argparse.ArgumentParser], None]
    """Adds the arguments that ask it."""
    answer: Callable[[Asked], dict[str, Any]]
    """Keys of the document that answer it; {} where it is not asked."""
    describe: Callable[[JsonDocument], Iterator[str]]
    """Lines of the answer, out of the whole document."""
