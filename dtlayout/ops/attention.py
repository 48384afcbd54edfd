"""Causal attention with exactly the backend that was asked for, through scaled_dot_product_attention or varlen_attn.

Legend: B batch, H query heads, G key-value heads, S sequence, K head width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import inf

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from dtlayout.base.errors import KernelError
from dtlayout.ops.documents import Documents, make_mask
from dtlayout.ops.flash_attn import FlashAttn
from dtlayout.spec.kernel_records import AttentionKernel
from dtlayout.spec.kernel_table import find_kernel

register_flash_attention_impl("flash-attn", register_fn=FlashAttn)
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Queries, keys, values, and a mask or offsets that keep documents apart → the result of attention."""
_REFUSALS = ("No available kernel", "No viable backend")
"""Texts in the error of a backend that does not support its inputs."""


def causal_attention(q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, kernel: str, mask: Tensor | None = None) -> Tensor:
    """softmax(q·kᵀ / √K + causal mask)·v, [B, H, S, K]; each of the G key-value heads serves H / G query heads.

    With a `mask` from `prepare_mask`, tokens see only those of their own document.
    """
    return bind_attention(find_kernel(AttentionKernel, kernel))(q_BHSK, k_BGSK, v_BGSK, mask)


@cache
def bind_attention(kernel: AttentionKernel) -> Attend:
    """`causal_attention` with one kernel: the same function each time, so that torch.compile reuses it for all blocks.

    Only the named backend is enabled, so that PyTorch cannot fall back to another one: where it does not support the
    inputs, this is a KernelError. What needs another flash implementation runs inside `attention_implementation` alone.
    """
    if kernel.function:
        return kernel.load()
    assert kernel.backend, "what can only be predicted is refused before a model is built"
    backend = getattr(SDPBackend, kernel.backend)

    def attend(q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and not kernel.needs_mask(q_BHSK.device.type):
            if q_BHSK.shape[-1] > (kernel.widest_head or inf):  # flash itself would give a traceback
                raise _refusal(kernel, q_BHSK)
            from dtlayout.ops.varlen import attend_by_document

            with sdpa_kernel(backend):  # or torch 2.15 takes cuDNN's kernel on Hopper
                return attend_by_document(q_BHSK, k_BGSK, v_BGSK, mask)
        if kernel.repeats_heads:
            k_BGSK, v_BGSK = repeat_heads(k_BGSK, q_BHSK.shape[1]), repeat_heads(v_BGSK, q_BHSK.shape[1])
        try:
            with sdpa_kernel(backend):
                is_grouped = q_BHSK.shape[1] != k_BGSK.shape[1]
                return F.scaled_dot_product_attention(
                    q_BHSK, k_BGSK, v_BGSK, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped
                )
        except RuntimeError as error:
            if not any(refusal in str(error) for refusal in _REFUSALS):
                raise
            raise _refusal(kernel, q_BHSK) from error

    return attend


def _refusal(kernel: AttentionKernel, q_BHSK: Tensor) -> KernelError:
    return KernelError(
        f"kernels.attention={kernel.name!r} does not run {q_BHSK.dtype} heads of width {q_BHSK.shape[-1]} on "
        f"{q_BHSK.device.type}; use kernels.attention='sdpa-math', which runs everything"
    )


def prepare_mask(documents: Documents, kernel: str, like: Tensor) -> Tensor:
    """Mask [B, 1, S, S], or offsets of the documents, as `kernel` needs it to keep documents apart.

    The mask has the device and format of `like`, the offsets the device. It is made once for all layers.
    """
    if find_kernel(AttentionKernel, kernel).needs_mask(like.device.type):
        return make_mask(documents.starts.to(like.device, non_blocking=True), like.dtype)
    return documents.offsets.to(like.device, non_blocking=True)


def repeat_heads(x_BGSK: Tensor, num_heads: int) -> Tensor:
    """Key-value heads, repeated for each query head that they serve, [B, H, S, K]: some backends need that."""
    group = num_heads // x_BGSK.shape[1]
    return x_BGSK if group == 1 else x_BGSK.repeat_interleave(group, dim=1)


@contextmanager
def attention_implementation(kernel: str) -> Iterator[None]:
    """Inside, PyTorch's flash backend runs the implementation that `kernel` names; afterwards it runs its own again."""
    name = find_kernel(AttentionKernel, kernel).flash
    if not name:
        yield
        return
    try:
        activate_flash_attention_impl(name)
    except (ImportError, RuntimeError, ValueError) as error:  # not installed, for another torch, or unknown to this one
        reason = str(error).partition("\n")[0]
        raise KernelError(f"kernels.attention={kernel}: {reason}; install its package for this torch") from error
    try:
        yield
    finally:
        restore_flash_attention_impl()
