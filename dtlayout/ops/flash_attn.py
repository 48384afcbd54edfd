"""The flash-attn package as PyTorch's flash attention on CUDA: two operators of aten computed by its functions.

Autograd, meta functions and everything that calls scaled_dot_product_attention stay PyTorch's own, which also pads K to
a multiple of 8 before it comes here. Written for flash-attn 2.7 and 2.8.

Legend: B batch, H query heads, G key-value heads, S sequence, K head width.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import register_flash_attention_impl

NAME = "flash-attn"
"""The implementation's name in `torch.nn.attention`."""


@dataclass
class Overrides:
    """Keeps the overrides alive."""

    library: Library | None

    def remove(self) -> None:
        """The operators are PyTorch's own again."""
        self.library = None


def override_flash(dispatch_key: str = "CUDA") -> Overrides:
    """Put flash-attn under aten's flash attention, forward and backward, for a dispatch key; ImportError without it."""
    kernels = _Kernels(import_module("flash_attn.flash_attn_interface"))
    library = Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", kernels.forward, dispatch_key)
    library.impl("_scaled_dot_product_flash_attention_backward", kernels.backward, dispatch_key)
    return Overrides(library)


register_flash_attention_impl(NAME, register_fn=override_flash)


class _Kernels:
    """The signatures of aten around the package's functions, which want [B, S, H, K]."""

    def __init__(self, interface: Any):
        self.interface = interface

    def forward(
        self,
        q_BHSK: Tensor,
        k_BGSK: Tensor,
        v_BGSK: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        out_BSHK, log_sums_BHS, debug_mask, rng_state = self.interface._flash_attn_forward(
            *(t.transpose(1, 2) for t in (q_BHSK, k_BGSK, v_BGSK)),
            dropout_p,
            _scale(q_BHSK, scale),
            causal=is_causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=return_debug_mask,
        )
        out_BHSK = out_BSHK.transpose(1, 2)
        if out_BHSK.stride() != q_BHSK.stride():  # torch.compile counts on the strides of the queries
            out_BHSK = torch.empty_like(q_BHSK).copy_(out_BHSK)
        unused = rng_state.new_zeros(())
        lengths = q_BHSK.shape[2], k_BGSK.shape[2]
        return out_BHSK, log_sums_BHS, None, None, *lengths, rng_state, unused, debug_mask

    def backward(
        self,
        grad_out: Tensor,
        q_BHSK: Tensor,
        k_BGSK: Tensor,
        v_BGSK: Tensor,
        out_BHSK: Tensor,
        log_sums_BHS: Tensor,
        _starts_q: Tensor | None,
        _starts_k: Tensor | None,
        _max_q: int,
        _max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: Tensor,
        _unused: Tensor,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:
        gradients = tuple(torch.empty_like(t) for t in (q_BHSK, k_BGSK, v_BGSK))
        self.interface._flash_attn_backward(
            *(t.transpose(1, 2) for t in (grad_out, q_BHSK, k_BGSK, v_BGSK, out_BHSK)),
            log_sums_BHS,
            *(t.transpose(1, 2) for t in gradients),
            dropout_p,
            _scale(q_BHSK, scale),
            causal=is_causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            rng_state=rng_state,
        )
        return gradients


def _scale(q_BHSK: Tensor, scale: float | None) -> float:
    """1 / √K unless it is given, as it is where K is padded."""
    return float(q_BHSK.shape[-1] ** -0.5 if scale is None else scale)
