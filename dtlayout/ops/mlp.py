"""SwiGLU (arXiv:2002.05202): silu(gate) · up, the gated activation of Llama's feed-forward, elementwise."""

from torch import Tensor
from torch.nn import functional as F


def eager_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU as two operations."""
    return F.silu(gate) * up


def liger_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """liger-kernel's SwiGLU; backward writes the gradients over `gate` and `up`, so it can run only once."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)
