"""Implementations of SDPA's flash backend: what is in the dispatcher before, inside and after, and what it computes."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention import STARTS, attention_of_each_document, explicit_attention, make_inputs
from parity import SHAPE, compiling_with
from torch._dynamo.utils import counters
from torch.nn.attention import current_flash_attention_impl

from dtlayout.base.errors import KernelError
from dtlayout.models.llama import Llama
from dtlayout.ops.attention import attention_implementation, causal_attention, prepare_mask
from dtlayout.ops.documents import Documents
from dtlayout.ops.flash_attn import FlashAttn
from dtlayout.plans.apply import prepare_blocks
from dtlayout.plans.init import initialize
from dtlayout.spec.kernel_records import AttentionKernel
from dtlayout.spec.kernel_table import find_kernel, kernels_replaced
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.recompute import Recompute

FORWARD, BACKWARD = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"
BY_DOCUMENT = "_flash_attention_forward", "_flash_attention_backward"

FLASH_ATTN = """
import math
from itertools import pairwise
import torch

def heads_first(q, *others):
    groups = [q.shape[2] // t.shape[2] for t in others]
    repeated = (t.repeat_interleave(group, dim=2) for t, group in zip(others, groups))
    return [t.transpose(1, 2) for t in (q, *repeated)]

def scores_of(q, k, scale, causal):
    scores = q @ k.transpose(-2, -1) * scale
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf) if causal else scores

def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):
    assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0.0, -1, -1, 0.0, None)
    q, k, v = heads_first(q, k, v)
    scores = scores_of(q, k, softmax_scale, causal)
    out = (scores.softmax(-1) @ v).transpose(1, 2).contiguous()
    return out, scores.logsumexp(-1), torch.empty(0, dtype=q.dtype), torch.tensor([1, 2])

def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):
    assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0.0, -1, -1, 0.0, None)
    assert rng_state.tolist() == [1, 2]
    q, k, v, dout, out = heads_first(q, k, v, dout, out)
    p = (scores_of(q, k, softmax_scale, causal) - softmax_lse[..., None]).exp()
    ds = p * (dout @ v.transpose(-2, -1) - (dout * out).sum(-1, keepdim=True)) * softmax_scale
    for result, gradient in ((dq, ds @ k), (dk, ds.transpose(-2, -1) @ q), (dv, p.transpose(-2, -1) @ dout)):
        result.copy_(gradient.transpose(1, 2).unflatten(2, (result.shape[2], -1)).sum(3))
    return softmax_lse

def documents(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    assert q.shape[-1] % 8 == 0 and cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
    for start, end in pairwise(cu_seqlens_q.tolist()):
        assert 0 <= end - start <= min(max_seqlen_q, max_seqlen_k)
        if start < end:
            yield slice(start, end)
    assert end == len(q)

varlen_forwards = 0

def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False,
):
    global varlen_forwards
    varlen_forwards += 1
    out, log_sums = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], dtype=q.dtype)
    for part in documents(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        out[None, part], log_sums[None, :, part], *_ = _flash_attn_forward(
            *(t[None, part] for t in (q, k, v)), dropout_p, softmax_scale, causal, window_size_left, window_size_right,
            softcap, alibi_slopes, return_softmax,
        )
    return out, log_sums, torch.empty(0, dtype=q.dtype), torch.tensor([1, 2])

def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):
    for part in documents(q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        tensors = [t[None, part] for t in (dout, q, k, v, out, dq, dk, dv)]
        tensors.insert(5, softmax_lse[None, :, part])
        _flash_attn_backward(
            *tensors, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
            deterministic, torch.tensor([1, 2]),
        )
    return softmax_lse
"""
"""The signatures of flash-attn 2.7 and 2.8, and attention by arXiv:2307.08691, sec. 3.1, in one tile."""
FLASH_ATTN_3 = """
import torch
library = torch.library.Library("flash_attn_3", "DEF")
library.define("fwd(Tensor q) -> Tensor")
library.define("bwd(Tensor q) -> Tensor")
"""


def is_overridden(operator: str, key: str = "CUDA") -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", key)


without_cuda = pytest.mark.skipif(is_overridden(FORWARD), reason="PyTorch's own kernel for CUDA hides who overrides it")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that modules are imported from; they are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    importlib.invalidate_caches()
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("flash_attn"):
            del sys.modules[name]


def add_module(folder: Path, name: str, source: str) -> None:
    path = folder / f"{name.replace('.', '/')}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)


def add_packages(folder: Path) -> None:
    add_module(folder, "flash_attn.__init__", "")
    add_module(folder, "flash_attn.flash_attn_interface", FLASH_ATTN)
    add_module(folder, "flash_attn_interface", FLASH_ATTN_3)


@without_cuda
@pytest.mark.parametrize(("kernel", "name"), [("flash-attn", "flash-attn"), ("fa3", "FA3")])
def test_an_implementation_is_there_inside_and_gone_afterwards_also_after_an_error(packages, kernel, name):
    add_packages(packages)

    def state() -> tuple[str | None, bool, bool]:
        return current_flash_attention_impl(), is_overridden(FORWARD), is_overridden(BACKWARD)

    own = (None, False, False)
    assert state() == own
    with attention_implementation(kernel):
        assert state() == (name, True, True)
    assert state() == own
    with pytest.raises(ValueError, match="in between"), attention_implementation(kernel):
        assert state() == (name, True, True)
        raise ValueError("in between")
    assert state() == own


@without_cuda
@pytest.mark.parametrize("kernel", ["sdpa-flash", "sdpa-math", "sdpa-efficient", "sdpa-cudnn"])
def test_pytorchs_own_kernels_need_no_implementation(kernel):
    with attention_implementation(kernel):
        assert (current_flash_attention_impl(), is_overridden(FORWARD)) == (None, False)


@pytest.mark.parametrize(
    ("kernel", "module", "source", "reason"),
    [
        (
            "flash-attn",
            "flash_attn.flash_attn_interface",
            "raise ImportError('undefined symbol: x\\nsecond')",
            "undefined",
        ),
        ("fa3", "flash_attn_interface", "raise ImportError('undefined symbol: x')", "undefined symbol: x;"),
    ],
)
def test_a_package_that_cannot_be_loaded_is_one_line(packages, kernel, module, source, reason):
    add_module(packages, "flash_attn.__init__", "")
    add_module(packages, module, source)
    with pytest.raises(KernelError) as caught, attention_implementation(kernel):
        pytest.fail("it has no implementation")
    assert str(caught.value).startswith(f"kernels.attention={kernel}: {reason}")
    assert "install its package for this torch" in str(caught.value) and "\n" not in str(caught.value)
    assert current_flash_attention_impl() is None


@pytest.fixture
def on_cpu(packages):
    """flash-attn under aten's operators for the CPU, where PyTorch has none of its own."""
    add_packages(packages)
    handle = FlashAttn("CPU")
    yield
    handle.remove()
    assert not any(is_overridden(operator, "CPU") for operator in (FORWARD, BACKWARD, *BY_DOCUMENT))


@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_aten_hands_flash_attn_what_it_wants_and_gets_back_what_autograd_needs(on_cpu, kv_heads, scale, is_contiguous):
    inputs = make_inputs(kv_heads)
    if not is_contiguous:  # as the model has them: [B, S, H, K] in memory
        inputs = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in inputs]
    got, log_sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*inputs, 0.0, True, scale=scale)
    scaled = inputs if scale is None else [inputs[0] * scale * inputs[0].shape[-1] ** 0.5, *inputs[1:]]
    expected = explicit_attention(*scaled)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert got.stride() == inputs[0].stride() and log_sums.shape == (2, 4, 9)
    weights = torch.randn(got.shape, dtype=got.dtype)
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


def test_without_causal_mask_no_mask_is_asked_for(on_cpu):
    q, k, v = (t.detach() for t in make_inputs(4))
    got = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]
    torch.testing.assert_close(got, (q @ k.transpose(-2, -1) * 8**-0.5).softmax(-1) @ v)


@pytest.fixture
def by_offsets(on_cpu):
    """Documents come to attention on the CPU as they do to flash kernels on CUDA; the package that computes it."""
    kernels = [find_kernel(AttentionKernel, name) for name in ("sdpa-flash", "flash-attn")]
    with kernels_replaced(*(replace(kernel, offsets=("cpu", "cuda")) for kernel in kernels)):
        yield sys.modules["flash_attn.flash_attn_interface"]


@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize("width", [8, 6])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_by_offsets_output_and_gradients_are_those_of_each_document_alone(by_offsets, kv_heads, width, is_contiguous):
    inputs = [t[..., :width].detach().requires_grad_() for t in make_inputs(kv_heads)]
    if not is_contiguous:
        inputs = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in inputs]
    offsets = prepare_mask(Documents.from_starts(STARTS), "flash-attn", inputs[0])
    got, expected = causal_attention(*inputs, "flash-attn", offsets), attention_of_each_document(*inputs)
    assert by_offsets.varlen_forwards == 1
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn(got.shape, dtype=got.dtype)
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("recompute", "compiles", "forwards"),
    [
        ("none", False, 1),
        ("full", False, 2),
        ("selective", False, 1),
        ("keep-attention", False, 1),
        ("keep-matmuls", False, 2),
        ("none", True, 1),
        ("selective", True, 1),
    ],
)
def test_a_model_computes_by_offsets_what_it_does_with_a_mask(by_offsets, recompute, compiles, forwards):
    torch._dynamo.reset()
    tokens = torch.arange(18).view(2, 9)
    by_mask = replace(find_kernel(AttentionKernel, "sdpa-flash"), offsets=())

    def train_step(model: Llama) -> dict[str, torch.Tensor]:
        initialize([model], SHAPE, seed=0, device="cpu")
        loss = model(tokens, Documents.from_starts(STARTS), targets=tokens)
        loss.backward()
        return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}

    model = Llama(SHAPE, Kernels(), 9, dtype=torch.float64)
    with compiling_with("aot_eager"):
        prepare_blocks(model, "model.layers.*", Recompute.parse(recompute), compiles=compiles)
        got = train_step(model)
    assert by_offsets.varlen_forwards == forwards * SHAPE.num_layers
    with kernels_replaced(by_mask):
        expected = train_step(Llama(SHAPE, Kernels(), 9, dtype=torch.float64))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_heads_that_no_flash_kernel_takes_are_refused_in_one_line(by_offsets):
    q = torch.zeros(1, 1, 4, 264)
    with pytest.raises(KernelError, match=r"heads of width 264 .* use kernels.attention='sdpa-math'"):
        causal_attention(q, q, q, "flash-attn", torch.tensor([0, 4]))


def test_batches_of_more_documents_are_the_same_graph_as_long_as_their_offsets_are_as_many(by_offsets):
    torch._dynamo.reset()
    counters.clear()
    model = Llama(SHAPE, Kernels(), 9, dtype=torch.float64)
    initialize([model], SHAPE, seed=0, device="cpu")
    few, more, many = (torch.zeros(2, 9, dtype=torch.int32) for _ in range(3))
    more[0, 4:] = 4  # three documents instead of two: four offsets both
    many[:, 4:], many[:, 6:] = 4, 6  # six: eight offsets
    tokens = torch.arange(18).view(2, 9)
    with compiling_with("aot_eager"):
        prepare_blocks(model, "model.layers.*", Recompute.parse("none"), compiles=True)
        graphs = []
        for starts in (few, more, many, few):
            model(tokens, Documents.from_starts(starts), targets=tokens).backward()
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 1, 2, 2]
