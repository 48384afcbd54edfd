"""Successive halving: find the fastest of many layouts with a fraction of the steps (arXiv:1502.07943).

The first choice costs nothing: of the layouts that are predicted to fit, those that are predicted fastest are tried.
Each round then runs the remaining layouts for more steps than the round before, and keeps the fastest. A layout that
fails in one round is not in the next.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dtlayout.base.errors import InvalidConfig

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Halving:
    """Number of trials that go on from one round of successive halving to the next, and their steps."""

    keep: float = 1 / 3
    """Share of a round that goes on to the next, rounded up; between 0 and 1."""
    steps: tuple[int, ...] = (6, 12)
    """Steps of each round."""
    first: float = 1 / 3
    """Share of all trials that the first round tries: those predicted fastest."""

    def __post_init__(self) -> None:
        problems = [
            f"halving.{name}={value!r} must lie above 0 and be at most 1"
            for name, value in (("keep", self.keep), ("first", self.first))
            if not 0 < value <= 1
        ]
        counts = list(self.steps)
        if not counts or counts != sorted(set(counts)) or counts[0] < 1:
            problems.append(f"halving.steps={counts} must be whole numbers of at least 1, each above the last")
        if problems:
            raise InvalidConfig(problems)


def halve(
    candidates: Sequence[T], halving: Halving, run: Callable[[Sequence[T], int], dict[T, float]]
) -> Iterator[list[T]]:
    """Candidates that are left after each round, the fastest first.

    `candidates` come in their predicted order. `run` tries some of them for a number of steps, and returns the seconds
    of a step for those that ran.

    >>> seconds = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 9.0}
    >>> list(halve("abcd", Halving(first=0.75, keep=0.5), lambda tried, steps: {t: seconds[t] for t in tried}))
    [['b', 'c'], ['b']]
    """
    left = list(candidates[: math.ceil(halving.first * len(candidates))])
    for place, steps in enumerate(halving.steps):
        found = run(left, steps)
        num_kept = 1 if place + 1 == len(halving.steps) else math.ceil(halving.keep * len(left))
        left = sorted(found, key=lambda each: found[each])[:num_kept]
        if not left:
            return
        yield left
