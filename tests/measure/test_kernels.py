import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from dtlayout.measure.kernels import AttentionRecorder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize(("backend", "kernel"), [(SDPBackend.MATH, "math"), (SDPBackend.FLASH_ATTENTION, "flash")])
def test_each_forward_call_counts_as_the_kernel_that_ran(backend, kernel, num_kv_heads, is_causal, dtype):
    q = torch.randn(1, 4, 8, 16, dtype=dtype, requires_grad=True)
    k = torch.randn(1, num_kv_heads, 8, 16, dtype=dtype, requires_grad=True)
    with AttentionRecorder() as recorder, sdpa_kernel(backend):
        for _ in range(3):
            scaled_dot_product_attention(q, k, k, is_causal=is_causal, enable_gqa=num_kv_heads < 4).sum().backward()
    assert recorder.counts == {kernel: 3}
    assert recorder.executed == {kernel}


def test_masked_math_attention_is_math():
    q = torch.randn(1, 2, 8, 16)
    with AttentionRecorder() as recorder, sdpa_kernel(SDPBackend.MATH):
        scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(8, 8).tril().bool())
    assert recorder.executed == {"math"}


def test_a_recomputed_call_counts_again():
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    with AttentionRecorder() as recorder, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        checkpoint(scaled_dot_product_attention, q, q, q, use_reentrant=False).sum().backward()
    assert recorder.counts == {"flash": 2}


def test_other_operators_are_no_attention():
    with AttentionRecorder() as recorder:
        torch.randn(4, 4).softmax(-1) @ torch.randn(4, 4)
    assert recorder.executed == set()
