"""Attention to parts of the keys, joined by their log-sum-exp, is attention to all of them; and so are gradients."""

import pytest
import torch
from cuda import StandInCuda

from dtlayout.ops import partial
from dtlayout.ops.partial import CHUNKS, FLASH, SCORES, Partial, join

B, H, G, S, N, K = 2, 4, 2, 150, 210, 8  # more queries than a chunk has
KERNELS = {"scores": SCORES, "chunks": CHUNKS, "flash": FLASH}
EXACT, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16


def make_inputs(num_keys: int = N, dtype: torch.dtype = EXACT) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (B, H, S, K), (B, G, num_keys, K), (B, G, num_keys, K)
    return [torch.randn(shape, generator=generator, dtype=EXACT).to(dtype).requires_grad_() for shape in shapes]


def attend_plainly(q, k, v, mask):
    """softmax(q·kᵀ / √K + mask)·v, and log-sum-exp, with each key-value head repeated."""
    k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
    scores = q @ k.mT / K**0.5 + mask
    return torch.softmax(scores, -1) @ v, scores.logsumexp(-1)


def attend_in_two_parts(kernel: Partial, q, k, v, upstream, first: int):
    """The joined result and the gradients, from the keys before `first` and from the others."""
    parts = [(k[:, :, here], v[:, :, here]) for here in (slice(first), slice(first, None))]
    exact = torch.promote_types(q.dtype, FP32)
    out, sums = torch.zeros(q.shape, dtype=exact), torch.full(q.shape[:3], -torch.inf, dtype=exact)
    for part in parts:
        other_out, other_sums = kernel.forward(q, *part, False)
        join(out, sums, other_out.to(exact), other_sums)
    out = out.to(q.dtype)
    terms = [kernel.backward(upstream, q, *part, out, sums, False) for part in parts]
    of_queries, of_keys, of_values = zip(*terms, strict=True)
    return out, sums, [of_queries[0] + of_queries[1], torch.cat(of_keys, 2), torch.cat(of_values, 2)]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("dtype", "allowed"), [(EXACT, 1e-12), (FP32, 1e-5), (BF16, 2e-2)], ids=str)
def test_nothing_and_two_parts_are_the_whole(name, dtype, allowed):
    q, k, v = make_inputs(dtype=dtype)
    upstream = torch.randn(B, H, S, K, dtype=EXACT).to(dtype)
    wanted, wanted_sums = attend_plainly(*(x.to(EXACT) for x in (q, k, v)), torch.zeros(S, N, dtype=EXACT))
    gradients = torch.autograd.grad(wanted, (q, k, v), upstream.to(EXACT))
    with torch.no_grad():
        out, sums, found = attend_in_two_parts(KERNELS[name], q, k, v, upstream, first=90)
    for got, expected in zip([out, sums, *found], [wanted, wanted_sums, *gradients], strict=True):
        assert (got - expected).norm() <= allowed * expected.norm()


@pytest.mark.parametrize("name", KERNELS)
def test_a_causal_part_is_a_square_in_which_nobody_sees_later_keys(name):
    q, k, v = make_inputs(num_keys=S)
    mask = torch.full((S, S), -torch.inf, dtype=EXACT).triu_(1)
    wanted, wanted_sums = attend_plainly(q, k, v, mask)
    upstream = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, (q, k, v), upstream)
    with torch.no_grad():
        out, sums = KERNELS[name].forward(q, k, v, True)
        found = KERNELS[name].backward(upstream, q, k, v, out, sums, True)
    for got, expected in zip([out, sums, *found], [wanted, wanted_sums, *gradients], strict=True):
        assert (got - expected).norm() <= 1e-12 * expected.norm()


@pytest.mark.parametrize("width", [8, 20])
@pytest.mark.parametrize("is_causal", [False, True])
def test_cudas_flash_kernel_is_the_cpus_with_heads_padded_to_its_width(monkeypatch, width, is_causal):
    """The CPU's operators stand for CUDA's, by its arguments; tensors say that they are on CUDA to what asks alone."""
    generator = torch.Generator().manual_seed(2)
    q, k, v, upstream = (torch.randn(B, H, S, width, generator=generator) for _ in range(4))
    out, sums = partial._flash_forward(q, k, v, is_causal)
    wanted = partial._flash_backward(upstream, q, k, v, out, sums, is_causal)
    ops = torch.ops.aten

    def forward(q, k, v, dropout, is_causal, *, scale):
        assert q.shape[-1] % 8 == 0
        made = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, is_causal, scale=scale)
        return *made, None, None, S, N, *torch.zeros(2, dtype=torch.uint64), None

    def backward(upstream, q, k, v, out, sums, ends_q, ends_k, most_q, most_k, dropout, is_causal, *_, scale):
        assert sums.is_contiguous() and (ends_q, ends_k, most_q, most_k) == (None, None, S, S)
        return ops._scaled_dot_product_flash_attention_for_cpu_backward(
            upstream, q, k, v, out, sums, dropout, is_causal, scale=scale
        )

    with StandInCuda(monkeypatch):
        monkeypatch.setattr(ops, "_scaled_dot_product_flash_attention", forward)
        monkeypatch.setattr(ops, "_scaled_dot_product_flash_attention_backward", backward)
        found, found_sums = partial._flash_forward(q, k, v, is_causal)
        gradients = partial._flash_backward(upstream, q, k, v, found, found_sums, is_causal)
    for one, other in zip((found, found_sums, *gradients), (out, sums, *wanted), strict=True):
        torch.testing.assert_close(one, other)
