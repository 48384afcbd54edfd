"""Attention as models of `transformers` ask for it: by our kernels, or in separate operations."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from dtlayout.base.errors import InvalidConfig
from dtlayout.ops.attention import bind_attention
from dtlayout.ops.documents import list_offsets, see_documents
from dtlayout.spec.kernel_records import AttentionKernel
from dtlayout.spec.kernel_table import find_kernel
from dtlayout.tracing.attention import attend, attend_otherwise, looks_attention_up, make_mask

B, H, G, S, K = 2, 4, 2, 6, 8
generator = torch.Generator().manual_seed(0)
QUERY = torch.randn(B, H, S, K, dtype=torch.float64, generator=generator)
KEY, VALUE = (torch.randn(B, G, S, K, dtype=torch.float64, generator=generator) for _ in range(2))
CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()
WINDOW = make_mask(
    batch_size=B, q_length=S, kv_length=S, local_size=3, mask_function=sliding_window_causal_mask_function(3)
)


def make_module(kernel: str = "sdpa-math") -> nn.Module:
    module = nn.Module()
    module.attend = bind_attention(find_kernel(AttentionKernel, kernel))
    module.attend_otherwise = attend_otherwise
    return module


def compute_scores(scale: float) -> torch.Tensor:
    return QUERY @ KEY.repeat_interleave(H // G, 1).transpose(-1, -2) * scale


def weigh(shares: torch.Tensor) -> torch.Tensor:
    return (shares @ VALUE.repeat_interleave(H // G, 1)).transpose(1, 2)


@pytest.mark.parametrize("kernel", ["sdpa-math", "sdpa-flash"])
@pytest.mark.parametrize("scaling", [None, K**-0.5, 0.7])
def test_kernels_get_queries_that_honour_the_scale(kernel, scaling):
    y_BSHK, _ = attend(make_module(kernel), QUERY, KEY, VALUE, None, scaling=scaling)
    scores = compute_scores(K**-0.5 if scaling is None else scaling).masked_fill(~CAUSAL, -math.inf)
    torch.testing.assert_close(y_BSHK, weigh(scores.softmax(-1)))


def test_masks_softcaps_and_sinks_are_exact():
    sinks = torch.linspace(-1, 2, H, dtype=torch.float64)
    for mask, cap, sink in [(WINDOW, None, None), (None, 1.5, None), (WINDOW, 1.5, None), (WINDOW, None, sinks)]:
        y_BSHK, _ = attend(make_module(), QUERY, KEY, VALUE, mask, scaling=0.3, softcap=cap, s_aux=sink)
        scores = compute_scores(0.3)
        scores = scores if cap is None else cap * (scores / cap).tanh()
        scores = scores.masked_fill(~(CAUSAL if mask is None else mask), -math.inf)
        total = scores.exp().sum(-1, keepdim=True)
        total = total if sink is None else total + sink.exp()[:, None, None]
        torch.testing.assert_close(y_BSHK, weigh(scores.exp() / total))


def test_values_of_another_width_and_attention_to_all_tokens_run_without_the_kernel():
    module = nn.Module()  # has no kernel
    module.attend_otherwise = attend_otherwise
    wide = torch.randn(B, G, S, 2 * K, dtype=torch.float64)
    y_BSHK, _ = attend(module, QUERY, KEY, wide, None)
    expected = F.scaled_dot_product_attention(QUERY, KEY, wide, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(y_BSHK, expected.transpose(1, 2))
    y_BSHK, _ = attend(module, QUERY, KEY, VALUE, None, is_causal=False)
    torch.testing.assert_close(y_BSHK, weigh(compute_scores(K**-0.5).softmax(-1)))


def test_offsets_of_documents_go_to_the_kernel_or_become_a_mask():
    starts = torch.tensor([[0, 0, 0, 3, 3, 5], [0, 1, 1, 1, 1, 1]])
    offsets, seen = list_offsets(starts), see_documents(starts)
    module = make_module()
    module.attend = lambda *arguments: arguments[0] + arguments[3].sum()
    y_BSHK, _ = attend(module, QUERY, KEY, VALUE, offsets)
    torch.testing.assert_close(y_BSHK, (QUERY + offsets.sum()).transpose(1, 2))
    y_BSHK, _ = attend(module, QUERY, KEY, VALUE, offsets, softcap=1.5)
    scores = 1.5 * (compute_scores(K**-0.5) / 1.5).tanh()
    torch.testing.assert_close(y_BSHK, weigh(scores.masked_fill(~seen, -math.inf).softmax(-1)))


def test_a_tensor_that_nobody_knows_is_refused():
    attend(make_module(), QUERY, KEY, VALUE, None, position_ids=torch.arange(S)[None], sliding_window=3)
    with pytest.raises(
        InvalidConfig, match="Module attends with block_table, which dtlayout's attention does not know"
    ):
        attend(make_module(), QUERY, KEY, VALUE, None, block_table=torch.arange(S))


def test_a_window_is_a_mask_unless_it_reaches_over_the_whole_sequence():
    rows, columns = torch.arange(S)[:, None], torch.arange(S)
    assert torch.equal(WINDOW[0, 0], (columns <= rows) & (columns > rows - 3))
    sizes = {"batch_size": B, "q_length": S, "kv_length": S}
    assert make_mask(**sizes) is None
    assert make_mask(**sizes, local_size=S, mask_function=sliding_window_causal_mask_function(S)) is None


def test_attention_modules_are_those_that_look_attention_up():
    assert looks_attention_up(LlamaAttention.__new__(LlamaAttention))
    assert not looks_attention_up(LlamaMLP.__new__(LlamaMLP))
    assert not looks_attention_up(BloomAttention.__new__(BloomAttention))
