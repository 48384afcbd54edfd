"""What was provoked and what came of it, one JSON line each, so that a fault run that broke off goes on."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Event:
    """One fault, or one comparison after several."""

    kind: str
    what: str
    """Which one of its kind: the same words are not provoked again."""
    problem: str = ""
    """What was lost or went wrong; empty if nothing was."""
    count: int = 1
    """How many faults it stands for; 0 for a comparison after them."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the page counts."""


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """How many faults of each kind there are to be."""

    kills: int
    inside: int
    """Of the kills, those that leave a save unfinished."""
    signals: int
    """SIGTERMs in each phase."""
    pairs: int
    """Of layouts."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str
    title: str
    promise: str
    """What each of them must come to."""
    provoke: Callable[[Path, Amounts, Sequence[Event]], Iterator[Event]]
    """In a folder of its own, those that are not among the events."""
    expected: Callable[[Amounts], int]
    """How many faults there are at least."""


class EventsFile:
    """events.jsonl of a fault run."""

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> list[Event]:
        """All of them but one that a kill has cut."""
        lines = self.path.read_text("utf-8").splitlines(keepends=True) if self.path.exists() else []
        return [Event(**json.loads(line)) for line in lines if line.endswith("\n")]

    def append(self, event: Event) -> None:
        """Add one."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(event)) + "\n")
