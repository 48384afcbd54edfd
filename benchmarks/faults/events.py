"""Events: faults that were provoked and what came of them, one JSON line each, so that a run that broke off goes on."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dtlayout.base.files import append_line, read_lines


@dataclass(frozen=True, kw_only=True)
class Event:
    """One fault, or one comparison after several."""

    kind: str
    what: str
    """Words that tell it from others of its kind; a fault with the same words is not provoked again."""
    problem: str = ""
    """Description of what was lost or went wrong; empty if nothing was."""
    count: int = 1
    """How many faults it stands for; 0 for a comparison after them."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Numbers and names that the page counts."""


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """How many faults of each kind there are to be."""

    kills: int
    inside: int
    """Kills that leave a save unfinished, among `kills`."""
    signals: int
    """SIGTERMs in each phase."""
    pairs: int
    """Pairs of layouts: one saves a checkpoint, the other one loads it."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str
    title: str
    promise: str
    """Sentence on how a run must come through each fault of this kind."""
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
        return [Event(**json.loads(line)) for line in read_lines(self.path)] if self.path.exists() else []

    def append(self, event: Event) -> None:
        """Add one."""
        append_line(self.path, json.dumps(asdict(event)))
