"""Recompute: which blocks drop their activations in forward and compute them again in backward, and what they keep."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from dtlayout.base.errors import InvalidConfig

Kept = Literal["matmuls", "attention"]
"""Operations whose results a covered block may keep beside its input."""

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
    """Each `every`-th block is recomputed; 0 is none, 1 is all."""
    kept: frozenset[Kept] = frozenset()
    """What of it is kept instead; none of it in full recomputation. With any of it go reduce-scatters and all-reduces,
    which wait for other ranks and leave little."""

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
        """Whether operations are told apart."""
        return bool(self.kept)

    def covers(self, layer: int) -> bool:
        """Whether this block, counted from 0 over the whole model, is recomputed."""
        return self.every > 0 and layer % self.every == self.every - 1

    def count(self, layers: range) -> int:
        """How many of these blocks are recomputed.

        >>> Recompute.parse("every-2").count(range(3, 8))
        3
        """
        return layers.stop // self.every - layers.start // self.every if self.every else 0
