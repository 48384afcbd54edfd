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
_SOME = re.compile(r"([1-9][0-9]*)-of-([1-9][0-9]*)")


@dataclass(frozen=True)
class Recompute:
    """A parsed `layout.recompute`.

    >>> Recompute.parse("every-2").covers(3)
    True
    """

    every: int
    """Number of blocks after which it repeats itself: the last `number` of each `every` are recomputed. 0: none. 1:
    all."""
    kept: frozenset[Kept] = frozenset()
    """Operations whose results a recomputed block keeps; empty in full recomputation. If there are any, the results of
    reduce-scatters and all-reduces are kept too: they wait for other ranks and are small."""
    number: int = 1
    """Number of recomputed blocks among each `every`."""

    @classmethod
    @cache
    def parse(cls, text: str) -> "Recompute":
        """Read none, full, keep-attention, keep-matmuls, selective, "every-N" or "N-of-M"; another text is an
        InvalidConfig."""
        if text == "none":
            return cls(0)
        if text in _KEPT:
            return cls(1, _KEPT[text])
        if match := _EVERY.fullmatch(text):
            return cls(int(match[1]))
        if (match := _SOME.fullmatch(text)) and 1 < (number := int(match[1])) < (every := int(match[2])):
            return cls(every, number=number)
        raise InvalidConfig(
            f"layout.recompute={text!r} is unknown; use none, {', '.join(_KEPT)}, every-N (every N-th block in full) "
            f"or N-of-M (N of every M blocks, 1 < N < M)"
        )

    @property
    def is_selective(self) -> bool:
        """Whether recomputed blocks keep the results of some operations."""
        return bool(self.kept)

    def covers(self, layer: int) -> bool:
        """Whether this block, counted from 0 over the whole model, is recomputed."""
        return self.every > 0 and layer % self.every >= self.every - self.number

    @property
    def is_partial(self) -> bool:
        """True if some blocks are recomputed and others are not."""
        return self.every > 1

    def count(self, layers: range) -> int:
        """Number of recomputed blocks among `layers`.

        >>> Recompute.parse("every-2").count(range(3, 8)), Recompute.parse("3-of-4").count(range(3, 8))
        (3, 4)
        """
        return self._count_below(layers.stop) - self._count_below(layers.start) if self.every else 0

    def _count_below(self, layer: int) -> int:
        periods, rest = divmod(layer, self.every)
        return periods * self.number + max(0, rest - (self.every - self.number))
