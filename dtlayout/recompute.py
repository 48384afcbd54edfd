"""Recompute: which blocks drop their activations in forward and compute them again in backward."""

import re
from dataclasses import dataclass
from functools import cache

from dtlayout.errors import InvalidConfig

_EVERY = re.compile(r"every-([1-9][0-9]*)")


@dataclass(frozen=True)
class Recompute:
    """A parsed `layout.recompute`.

    >>> Recompute.parse("every-2").covers(3)
    True
    """

    every: int
    """Each `every`-th block is recomputed; 0 is none, 1 is all."""
    selective: bool
    """Keep the results of matmuls, attention, reduce-scatters and all-reduces; compute only the rest again."""

    @classmethod
    @cache
    def parse(cls, text: str) -> "Recompute":
        """Read "none", "full", "selective" or "every-N"; anything else is an InvalidConfig."""
        fixed = {"none": cls(0, False), "full": cls(1, False), "selective": cls(1, True)}
        if text in fixed:
            return fixed[text]
        if match := _EVERY.fullmatch(text):
            return cls(int(match[1]), False)
        raise InvalidConfig(
            f"layout.recompute={text!r} is unknown; use none, full, selective or every-N (every N-th block in full)"
        )

    def covers(self, layer: int) -> bool:
        """Whether this block, counted from 0 over the whole model, is recomputed."""
        return self.every > 0 and layer % self.every == self.every - 1
