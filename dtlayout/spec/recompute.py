"""Recompute: the blocks that compute their activations again in backward, and the results that they keep."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from dtlayout.base.errors import InvalidConfig

Kept = Literal["matmuls", "attention"]
"""Operations whose results a recomputed block may keep beside its input."""

_KEPT: dict[str, frozenset[Kept]] = {
    "full": frozenset(),
    "keep-attention": frozenset({"attention"}),
    "keep-matmuls": frozenset({"matmuls"}),
    "selective": frozenset({"matmuls", "attention"}),
}
_EVERY = re.compile(r"every-([1-9][0-9]*)")


@dataclass(frozen=True)
class Recompute:
    """A parsed `layout.recompute`.

    >>> Recompute.parse("every-2").covers(3)
    True
    """

    every: int
    """Distance between recomputed blocks: each `every`-th one is. 0: none; 1: all."""
    kept: frozenset[Kept] = frozenset()
    """Operations whose results a recomputed block keeps; empty in full recomputation. If there are any, the results of
    reduce-scatters and all-reduces are kept too: they wait for other ranks and are small."""

    @classmethod
    @cache
    def parse(cls, text: str) -> "Recompute":
        """Read none, full, keep-attention, keep-matmuls, selective or "every-N"; anything else is an InvalidConfig."""
        if text == "none":
            return cls(0)
        if text in _KEPT:
            return cls(1, _KEPT[text])
        if match := _EVERY.fullmatch(text):
            return cls(int(match[1]))
        raise InvalidConfig(
            f"layout.recompute={text!r} is unknown; use none, {', '.join(_KEPT)} or every-N (every N-th block in full)"
        )

    @property
    def is_selective(self) -> bool:
        """Whether recomputed blocks keep the results of some operations."""
        return bool(self.kept)

    def covers(self, layer: int) -> bool:
        """Whether this block, counted from 0 over the whole model, is recomputed."""
        return self.every > 0 and layer % self.every == self.every - 1

    def count(self, layers: range) -> int:
        """Number of recomputed blocks among `layers`.

        >>> Recompute.parse("every-2").count(range(3, 8))
        3
        """
        return layers.stop // self.every - layers.start // self.every if self.every else 0
