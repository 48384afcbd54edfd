"""Causal attention: softmax attention in float64 with exactly the kernel that was asked for."""

import math

import pytest
import torch
from torch import Tensor

from dtlayout.errors import KernelError
from dtlayout.measure.kernels import AttentionRecorder
from dtlayout.ops.attention import BACKENDS, causal_attention

RAN = {"sdpa-flash": "flash", "sdpa-math": "math"}


def explicit_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition; each key-value head repeated for the query heads that share it."""
    group, seq_len = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future = torch.ones(seq_len, seq_len).triu(1).bool()
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v


def make_inputs(kv_heads: int, seq_len: int = 9, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(kv_heads)
    shapes = [(2, 4, seq_len, 8), (2, kv_heads, seq_len, 8), (2, kv_heads, seq_len, 8)]
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kernel", BACKENDS)
def test_output_and_gradients_are_those_of_explicit_softmax(kernel, kv_heads):
    inputs = make_inputs(kv_heads)
    got, expected = causal_attention(*inputs, kernel), explicit_attention(*inputs)
    weights = torch.randn(got.shape, dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kernel", BACKENDS)
def test_a_query_depends_on_no_later_key(kernel):
    q, k, v = (t.detach() for t in make_inputs(2))
    before = causal_attention(q, k, v, kernel)
    k[:, :, 5:] += 1
    v[:, :, 5:] -= 1
    after = causal_attention(q, k, v, kernel)
    assert torch.equal(before[:, :, :5], after[:, :, :5])
    assert not torch.isclose(before[:, :, 5:], after[:, :, 5:]).any(-1).all()


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kernel", BACKENDS)
def test_only_the_kernel_that_was_asked_for_runs(kernel, dtype, kv_heads):
    with AttentionRecorder() as recorder:
        causal_attention(*make_inputs(kv_heads, dtype=dtype), kernel)
    assert recorder.executed == {RAN[kernel]}


@pytest.mark.filterwarnings("ignore:Flash attention")
def test_inputs_that_flash_does_not_take_are_an_error_and_no_other_kernel_runs():
    q, k, v = make_inputs(4)
    narrow = v[..., :4]  # the math kernel takes values of another width
    assert causal_attention(q, k, narrow, "sdpa-math").shape[-1] == 4
    with AttentionRecorder() as recorder, pytest.raises(KernelError) as caught:
        causal_attention(q, k, narrow, "sdpa-flash")
    assert recorder.executed == set()
    message = str(caught.value)
    assert message.startswith("kernels.attention='sdpa-flash' does not run torch.float64 heads of width 8 on cpu; use ")
    assert "kernels.attention='sdpa-math'" in message


def test_other_failures_keep_their_own_message():
    q, k, v = make_inputs(4)
    with pytest.raises(RuntimeError, match="size") as caught:
        causal_attention(q, k[..., :4], v, "sdpa-math")
    assert not isinstance(caught.value, KernelError)
