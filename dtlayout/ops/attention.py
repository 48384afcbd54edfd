"""Causal attention, always through scaled_dot_product_attention, with exactly the backend that was asked for.

Legend: B batch, H query heads, G key-value heads, S sequence, K head width.
"""

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtlayout.errors import KernelError
from dtlayout.kernels import Attention

BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}


def causal_attention(q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, kernel: Attention) -> Tensor:
    """softmax(q·kᵀ / √K + causal mask)·v, [B, H, S, K]; each of the G key-value heads serves H / G query heads.

    Only the named backend is enabled, so that PyTorch cannot fall back to another one: where it does not support the
    inputs, this is a KernelError.
    """
    try:
        with sdpa_kernel(BACKENDS[kernel]):
            return F.scaled_dot_product_attention(
                q_BHSK, k_BGSK, v_BGSK, is_causal=True, enable_gqa=q_BHSK.shape[1] != k_BGSK.shape[1]
            )
    except RuntimeError as error:
        if "No available kernel" not in str(error) and "No viable backend" not in str(error):
            raise
        raise KernelError(
            f"kernels.attention={kernel!r} does not run {q_BHSK.dtype} heads of width {q_BHSK.shape[-1]} on "
            f"{q_BHSK.device.type}; use precision.compute='bfloat16' (which flash needs on CUDA) or "
            f"kernels.attention='sdpa-math'"
        ) from error
