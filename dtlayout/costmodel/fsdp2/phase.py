"""Phase: how held bytes change while something runs, as what it adds at its fullest and what it leaves.

Phases compose: a block's backward out of single changes, a stage's out of its blocks'. So the fullest moment of a
thousand operations is found without playing them one by one.
"""

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

Bytes = tuple[float, ...]
"""One number for each `MemoryKind`."""


class MemoryKind(IntEnum):
    """Purpose for which bytes are held, named as in `MemoryEstimate`."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER = 2
    ACTIVATIONS = 3
    LOGITS = 4
    BUFFERS = 5


NOTHING: Bytes = (0.0,) * len(MemoryKind)


class Phase(NamedTuple):
    """Bytes relative to those held before it."""

    fullest: Bytes
    """At the moment at which they add up to most, which may be its beginning."""
    left: Bytes
    """When it is over."""

    def times(self, count: int) -> "Phase":
        """This one `count` times in a row: fullest in the first round or, if each leaves more, in the last.

        >>> sum(changes((MemoryKind.LOGITS, 3), (MemoryKind.LOGITS, -2)).times(5).fullest)
        7.0
        """
        if count <= 1:
            return self if count == 1 else IDLE
        before_last = tuple((count - 1) * size for size in self.left)
        last = add(before_last, self.fullest)
        return Phase(last if sum(last) > sum(self.fullest) else self.fullest, add(before_last, self.left))


IDLE = Phase(NOTHING, NOTHING)


def add(a: Bytes, b: Bytes) -> Bytes:
    """Part by part."""
    return tuple(map(operator.add, a, b))


def changes(*steps: tuple[MemoryKind, float]) -> Phase:
    """A phase of single changes, one after the other: bytes that come (positive) or go (negative)."""
    held, total, most = list(NOTHING), 0.0, 0.0
    fullest = NOTHING
    for part, size in steps:
        held[part] += size
        total += size
        if total > most:
            most, fullest = total, tuple(held)
    return Phase(fullest, tuple(held))


def sequence(phases: Iterable[Phase]) -> Phase:
    """One after the other.

    >>> grow = changes((MemoryKind.LOGITS, 3), (MemoryKind.LOGITS, -2))
    >>> sum(sequence([grow, grow]).fullest), sum(sequence([grow, grow]).left)
    (4.0, 2.0)
    """
    lefts, total, most, at, at_most = list[Bytes](), 0.0, 0.0, 0, IDLE
    for phase in phases:
        if (most_here := total + sum(phase.fullest)) > most:
            most, at, at_most = most_here, len(lefts), phase
        lefts.append(phase.left)
        total += sum(phase.left)
    if not lefts:
        return IDLE
    return Phase(
        tuple(map(sum, zip(*lefts[:at], at_most.fullest, strict=True))), tuple(map(sum, zip(*lefts, strict=True)))
    )


def fullest_of(start: Bytes, phases: Sequence[Phase], order: Sequence[int]) -> Bytes:
    """Bytes held at the fullest moment of phases that follow each other, `start` included; `order` has their places.

    As `sequence`, but only the totals are added up on the way: for long schedules.
    """
    if not order:
        return start
    fullest, left = [sum(phase.fullest) for phase in phases], [sum(phase.left) for phase in phases]
    before = accumulate(map(left.__getitem__, order[:-1]), initial=0.0)
    totals = list(map(operator.add, before, map(fullest.__getitem__, order)))
    at = totals.index(max(totals))
    times = Counter(order[:at])
    lefts = [tuple(count * size for size in phases[place].left) for place, count in times.items()]
    return tuple(map(sum, zip(start, phases[order[at]].fullest, *lefts, strict=True)))
