"""SwiGLU (arXiv:2002.05202): silu(gate) · up."""

from torch import Tensor
from torch.nn import functional as F


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The gated activation of Llama's feed-forward, elementwise."""
    return F.silu(gate) * up
