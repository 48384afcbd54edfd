"""Phase: how held bytes change while something runs, as what it adds at its fullest and what it leaves.

Phases compose: a block's backward out of single changes, a stage's out of its blocks'. So the fullest moment of a
thousand operations is found without playing them one by one.
"""

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

Bytes = tuple[float, ...]
"""One number for each `Part`."""


class Part(IntEnum):
    """What bytes are held for."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER = 2
    ACTIVATIONS = 3
    LOGITS = 4
    BUFFERS = 5


NOTHING: Bytes = (0.0,) * len(Part)


@dataclass(frozen=True, slots=True)
class Phase:
    """Bytes relative to those held before it."""

    fullest: Bytes
    """At the moment at which they add up to most, which may be its beginning."""
    left: Bytes
    """When it is over."""

    def then(self, after: "Phase") -> "Phase":
        """This one, and `after` next.

        >>> grow = changes((Part.LOGITS, 3), (Part.LOGITS, -2))
        >>> sum(grow.then(grow).fullest), sum(grow.then(grow).left)
        (4.0, 2.0)
        """
        later = add(self.left, after.fullest)
        return Phase(later if sum(later) > sum(self.fullest) else self.fullest, add(self.left, after.left))

    def times(self, count: int) -> "Phase":
        """This one `count` times in a row: fullest in the first round or, if each leaves more, in the last.

        >>> sum(changes((Part.LOGITS, 3), (Part.LOGITS, -2)).times(5).fullest)
        7.0
        """
        if count < 1:
            return IDLE
        before_last = tuple((count - 1) * size for size in self.left)
        last = add(before_last, self.fullest)
        return Phase(last if sum(last) > sum(self.fullest) else self.fullest, add(before_last, self.left))


IDLE = Phase(NOTHING, NOTHING)


def add(a: Bytes, b: Bytes) -> Bytes:
    """Part by part."""
    return tuple(map(operator.add, a, b))


def changes(*steps: tuple[Part, float]) -> Phase:
    """Bytes that come (positive) and go (negative), one after the other."""
    held, total, most = [0.0] * len(Part), 0.0, 0.0
    fullest = NOTHING
    for part, size in steps:
        held[part] += size
        total += size
        if total > most:
            most, fullest = total, tuple(held)
    return Phase(fullest, tuple(held))


def sequence(phases: Iterable[Phase]) -> Phase:
    """One after the other."""
    whole = IDLE
    for phase in phases:
        whole = whole.then(phase)
    return whole


def fullest_of(start: Bytes, phases: Sequence[Phase]) -> Bytes:
    """What is held at the fullest moment of phases that follow each other, `start` included.

    As `sequence`, but only the totals are added up on the way: for long schedules.
    """
    total, most, at = 0.0, -1.0, 0
    distinct = {id(phase): phase for phase in phases}
    totals = {key: (sum(phase.fullest), sum(phase.left)) for key, phase in distinct.items()}
    for i, phase in enumerate(phases):
        fullest, left = totals[id(phase)]
        if total + fullest > most:
            most, at = total + fullest, i
        total += left
    if not phases:
        return start
    times = Counter(map(id, phases[:at]))
    lefts = [tuple(count * size for size in distinct[key].left) for key, count in times.items()]
    return tuple(map(sum, zip(start, phases[at].fullest, *lefts, strict=True)))
