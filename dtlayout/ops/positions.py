"""Positions of the tokens that a rank has, for models whose own code makes tables of them.

Legend: S sequence, s tokens of a sequence that a rank has.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dtlayout.ops.documents import Documents


class OwnPositions:
    """The positions of a rank's tokens: all of a sequence, unless `hold` says which."""

    def __init__(self, max_seq_len: int):
        """`max_seq_len` is the length S of the sequences that ranks share."""
        self.max_seq_len = max_seq_len
        self.parts: tuple[range, ...] = ()
        self.find_positions: Callable[[Documents], Tensor] | None = None
        """Function from documents to this rank's positions, [s]; None where documents don't decide them."""

    def hold(self, positions: tuple[range, ...]) -> None:
        """Have the tokens of these positions only, in this order."""
        self.parts = positions

    def find(self, documents: Documents | None, device: torch.device) -> Tensor | None:
        """Positions of this rank's tokens, [s] int64, which belong to these documents; None for whole sequences."""
        if not self.parts:
            return None
        if documents is not None and self.find_positions is not None:
            return self.find_positions(documents).to(device, non_blocking=True)
        return torch.cat([torch.arange(each.start, each.stop, device=device) for each in self.parts])
