"""Cross-entropy as a sum over valid tokens, so that the caller can divide by the tokens of the global batch.

Legend: B batch, S sequence, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
"""Target of a token that does not count."""


class CrossEntropy(nn.Module):
    """A module, so that a plan can replace its forward by the vocabulary-parallel one."""

    def forward(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        """Sum of -log p(target) over the targets that are not IGNORED: a scalar in fp32 or finer."""
        exact = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
        return F.cross_entropy(exact.flatten(0, 1), targets_BS.flatten(), ignore_index=IGNORED, reduction="sum")
