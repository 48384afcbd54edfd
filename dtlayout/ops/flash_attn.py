"""The flash-attn package as PyTorch's flash attention on CUDA: four operators of aten, computed by its functions.

Two are called by scaled_dot_product_attention, two by varlen_attn. Autograd, meta functions and all code that calls the
operators stay PyTorch's own. K is a multiple of 8 here. Written for flash-attn 2.7 and 2.8.

Legend: B batch, H query heads, G key-value heads, S sequence, K head width, T tokens of all documents.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.library import Library


class FlashAttn:
    """Puts flash-attn under aten's flash attention, forward and backward, for a dispatch key; ImportError without it.

    The methods have the signatures of aten, around the package's functions, which want [B, S, H, K]. The dispatcher
    leaves out arguments at the end that have their default; only those of `forward` have any.
    """

    def __init__(self, dispatch_key: str = "CUDA"):
        self.interface: Any = import_module("flash_attn.flash_attn_interface")
        self.library: Library | None = Library("aten", "IMPL")
        self.library.impl("_scaled_dot_product_flash_attention", self.forward, dispatch_key)
        self.library.impl("_scaled_dot_product_flash_attention_backward", self.backward, dispatch_key)
        self.library.impl("_flash_attention_forward", self.forward_by_document, dispatch_key)
        self.library.impl("_flash_attention_backward", self.backward_by_document, dispatch_key)

    def remove(self) -> None:
        """Give the operators back to PyTorch."""
        self.library = None

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
            return_softmax=return_debug_mask,
            **_UNUSED,
        )
        out_BHSK = out_BSHK.transpose(1, 2)
        if out_BHSK.stride() != q_BHSK.stride():  # torch.compile counts on the strides of the queries
            out_BHSK = torch.empty_like(q_BHSK).copy_(out_BHSK)
        unused = rng_state.new_zeros(())
        lengths = q_BHSK.shape[2], k_BGSK.shape[2]
        return out_BHSK, log_sums_BHS, None, None, *lengths, rng_state, unused, debug_mask

    def backward(self, *arguments: Any, scale: float | None = None) -> tuple[Tensor, ...]:
        grad_out, q_BHSK, k_BGSK, v_BGSK, out_BHSK, log_sums_BHS, *_, dropout_p, is_causal, rng_state, _ = arguments
        gradients = tuple(torch.empty_like(t) for t in (q_BHSK, k_BGSK, v_BGSK))
        self.interface._flash_attn_backward(
            *(t.transpose(1, 2) for t in (grad_out, q_BHSK, k_BGSK, v_BGSK, out_BHSK)),
            log_sums_BHS,
            *(t.transpose(1, 2) for t in gradients),
            dropout_p,
            _scale(q_BHSK, scale),
            causal=is_causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            rng_state=rng_state,
            **_UNUSED,
        )
        return gradients

    def forward_by_document(self, *arguments: Any, scale: float | None = None, **_: Any) -> tuple[Tensor, ...]:
        q_THK, k_TGK, v_TGK, offsets_q, offsets_k, max_q, max_k, dropout_p, is_causal, return_debug_mask = arguments
        assert offsets_q is not None, "samples of one length go through scaled_dot_product_attention"
        out_THK, log_sums_HT, debug_mask, rng_state = self.interface._flash_attn_varlen_forward(
            *(q_THK, k_TGK, v_TGK, offsets_q, offsets_k, max_q, max_k, dropout_p, _scale(q_THK, scale)),
            causal=is_causal,
            return_softmax=return_debug_mask,
            **_UNUSED,
        )
        return out_THK, log_sums_HT, rng_state, rng_state.new_zeros(()), debug_mask

    def backward_by_document(self, *arguments: Any, scale: float | None = None, **_: Any) -> tuple[Tensor, ...]:
        grad_out, q_THK, k_TGK, v_TGK, out_THK, log_sums_HT, *documents, dropout_p, is_causal, _, _ = arguments
        gradients = tuple(torch.empty_like(t) for t in (q_THK, k_TGK, v_TGK))
        self.interface._flash_attn_varlen_backward(
            *(grad_out, q_THK, k_TGK, v_TGK, out_THK, log_sums_HT, *gradients),
            *(*documents, dropout_p, _scale(q_THK, scale)),
            causal=is_causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **_UNUSED,
        )
        return gradients


_UNUSED = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}
"""Arguments for features that are not used: only `causal` limits what a query sees."""


def _scale(q: Tensor, scale: float | None) -> float:
    """`scale`, or 1 / √K where it is not given; it is given where K is padded."""
    return float(q.shape[-1] ** -0.5 if scale is None else scale)
