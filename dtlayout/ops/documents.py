"""Documents packed into samples, and the two forms in which attention kernels learn where each begins.

One form is a mask that is added to the scores, and holds causality too. The other is offsets: the positions at which
documents begin when the B·S tokens of a microbatch lie in one row.

Legend: B batch, S sequence, N documents of a microbatch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dtlayout.spec.context_parallel import chunk_length, deal_chunks


@dataclass(frozen=True)
class Documents:
    """The documents of a microbatch, on the CPU until a stage's forward needs them.

    A value instead of a tensor, since FSDP2 moves the tensors that go into a module to its device, and waits for them.
    """

    starts: Tensor
    """Position at which the document of each token starts, [B, S] int32."""
    offsets: Tensor
    """Offset of each document in the row of all tokens, from `list_offsets`."""

    @classmethod
    def from_starts(cls, starts_BS: Tensor) -> "Documents":
        """The documents that `starts_BS`, which lies on the CPU, describes."""
        return cls(starts_BS, list_offsets(starts_BS))

    def pinned(self) -> "Documents":
        """A copy in pinned memory, from which a copy to a GPU starts without waiting."""
        return Documents(self.starts.pin_memory(), self.offsets.pin_memory())


def list_offsets(starts_BS: Tensor) -> Tensor:
    """Offset of each document in the row of all tokens, and the end of the last one, int32.

    N + 1 numbers. The last one is repeated up to a power of two: those documents are empty, and torch.compile sees few
    shapes.

    >>> list_offsets(torch.tensor([[0, 0, 2], [0, 1, 1]]))
    tensor([0, 2, 3, 4, 6, 6, 6, 6], dtype=torch.int32)
    """
    positions_S = torch.arange(starts_BS.shape[1], device=starts_BS.device)
    firsts = (starts_BS == positions_S).flatten().nonzero().flatten()
    offsets = torch.full((1 << len(firsts).bit_length(),), starts_BS.numel(), dtype=torch.int32)
    offsets[: len(firsts)] = firsts
    return offsets


def count_scores(starts_BS: Tensor, length: int) -> Tensor:
    """Number of scores that the mask leaves in each chunk of `length` queries, over all samples, [S / length]."""
    positions_S = torch.arange(starts_BS.shape[1], device=starts_BS.device)
    return (positions_S + 1 - starts_BS).sum(0).unflatten(0, (-1, length)).sum(1)


# An operator, since torch.compile would break its graph where numbers are read.
@torch.library.custom_op("dtlayout::share_positions", mutates_args=())
def share_positions(starts_BS: Tensor, cp: int) -> Tensor:
    """Positions that each of `cp` ranks has, the same in all samples, [cp, s], int64 and ascending.

    All ranks have equally many positions, and the mask leaves them equally many scores, or nearly.
    """
    length = chunk_length(starts_BS.shape[1], cp)
    shares = deal_chunks(count_scores(starts_BS, length).tolist(), cp)
    return torch.arange(starts_BS.shape[1]).unflatten(0, (-1, length))[torch.tensor(shares)].flatten(1)


@share_positions.register_fake
def _(starts_BS: Tensor, cp: int) -> Tensor:
    return starts_BS.new_empty((cp, starts_BS.shape[1] // cp), dtype=torch.int64)


def make_mask(starts_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask [B, 1, S, S]: 0 where a query may see a key (a token of its document that is not later), -inf elsewhere.

    It has the format of the scores: a boolean one would be converted, and kept for backward, in each layer.
    """
    is_seen = see_documents(starts_BS)
    return torch.zeros(is_seen.shape, dtype=dtype, device=starts_BS.device).masked_fill_(~is_seen, -torch.inf)


def see_documents(starts_BS: Tensor) -> Tensor:
    """Mask [B, 1, S, S] that is true where a query may see a key."""
    positions_S = torch.arange(starts_BS.shape[1], device=starts_BS.device)
    return ((positions_S <= positions_S[:, None]) & (positions_S >= starts_BS[..., None])).unsqueeze(1)


def find_starts(offsets: Tensor, num_samples: int, seq_len: int) -> Tensor:
    """Position at which the document of each token starts, [B, S] int64, of the offsets of `list_offsets`.

    >>> find_starts(torch.tensor([0, 2, 3, 4, 6, 6, 6, 6]), 2, 3)
    tensor([[0, 0, 2],
            [0, 1, 1]])
    """
    places = torch.arange(num_samples * seq_len, device=offsets.device)
    firsts = offsets[torch.searchsorted(offsets, places, right=True) - 1].to(torch.int64)
    return (firsts - places).view(num_samples, seq_len) + torch.arange(seq_len, device=offsets.device)
