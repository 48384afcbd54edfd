"""Where documents start inside samples: each after an end-of-document token, which belongs to the one that it ends."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def find_starts(tokens_BS: "Tensor", end_of_document: int) -> "Tensor":
    """For each token the position at which its document starts, [B, S] int32; the first one of a sample starts at 0.

    >>> import torch
    >>> find_starts(torch.tensor([[7, 0, 5, 6, 0]]), end_of_document=0)
    tensor([[0, 0, 2, 2, 2]], dtype=torch.int32)
    """
    import torch

    is_first_BS = torch.zeros_like(tokens_BS, dtype=torch.bool)
    is_first_BS[:, 1:] = tokens_BS[:, :-1] == end_of_document
    positions_S = torch.arange(tokens_BS.shape[1], dtype=torch.int32, device=tokens_BS.device)
    return (is_first_BS * positions_S).cummax(dim=1).values
