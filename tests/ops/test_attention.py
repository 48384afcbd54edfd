"""Causal attention: softmax attention in float64 with exactly the kernel that was asked for."""

import math
from dataclasses import replace

import pytest
import torch
from attention import STARTS, attention_of_each_document, explicit_attention, make_inputs
from torch.nn.attention import SDPBackend

from dtlayout.base.errors import KernelError
from dtlayout.measure.kernels import KernelRecorder
from dtlayout.ops import blockwise
from dtlayout.ops.attention import (
    attention_implementation,
    bind_attention,
    causal_attention,
    prepare_mask,
    repeat_heads,
)
from dtlayout.ops.blockwise import _weigh
from dtlayout.ops.documents import Documents, make_mask
from dtlayout.spec.kernel_records import AttentionKernel
from dtlayout.spec.kernel_table import find_kernel, find_packages, list_kernels

KERNELS = [kernel for kernel in list_kernels(AttentionKernel) if kernel.formats()]
RAN = {"sdpa-flash": "flash", "sdpa-math": "math", "blockwise": "blockwise"}
on_cpu = pytest.mark.parametrize("kernel", RAN)


def test_every_kernel_but_those_of_other_engines_and_auto_has_a_backend_or_a_function():
    predicted_only = {kernel.name for kernel in list_kernels(AttentionKernel)} - {kernel.name for kernel in KERNELS}
    assert predicted_only == {"flash1", "megatron-softmax", "torch"}
    assert all(kernel.backend in SDPBackend.__members__ or kernel.load() for kernel in KERNELS)
    assert {kernel.name for kernel in KERNELS if kernel.cpu} == set(RAN)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@on_cpu
def test_output_and_gradients_are_those_of_explicit_softmax(kernel, kv_heads):
    inputs = make_inputs(kv_heads)
    got, expected = causal_attention(*inputs, kernel), explicit_attention(*inputs)
    weights = torch.randn(got.shape, dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@on_cpu
def test_with_documents_output_and_gradients_are_those_of_each_document_alone(kernel, kv_heads):
    inputs = make_inputs(kv_heads)
    mask = prepare_mask(Documents.from_starts(STARTS), kernel, inputs[0])
    got, expected = causal_attention(*inputs, kernel, mask), attention_of_each_document(*inputs)
    weights = torch.randn(got.shape, dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (got, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("chunk", "heads"), [(2, 1), (4, 2), (8, 1)])
def test_blockwise_is_the_same_in_every_number_of_chunks(monkeypatch, chunk, heads, documents):
    inputs = make_inputs(2)
    mask = prepare_mask(Documents.from_starts(STARTS), "blockwise", inputs[0]) if documents else None
    expected = (attention_of_each_document if documents else explicit_attention)(*inputs)
    (_, num_heads, seq_len, _), num_chunks = inputs[0].shape, []
    monkeypatch.setattr(blockwise, "_CHUNK_BYTES", 8 * chunk)
    monkeypatch.setattr(blockwise, "_SCORES_BYTES", 8 * chunk * seq_len * num_heads // 2 * heads)
    monkeypatch.setattr(blockwise, "_weigh", lambda *args: num_chunks.append(args[1].shape[0]) or _weigh(*args))
    got = causal_attention(*inputs, "blockwise", mask)
    assert num_chunks == [heads] * (len(inputs[0]) * 2 // heads * math.ceil(seq_len / chunk))
    weights = torch.randn(got.shape, dtype=torch.float64)
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (got, expected)]
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


def test_blockwise_is_an_operator_that_torch_can_trace():
    q, k, v = (t[:1].detach().requires_grad_() for t in make_inputs(2))
    torch.library.opcheck(torch.ops.dtlayout.blockwise_attention.default, (q, k, v, None))


def test_no_other_kernel_takes_what_comes_as_offsets(monkeypatch):
    enabled = []

    def attend(*inputs):
        cuda = torch.backends.cuda
        enabled.append([cuda.flash_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.mem_efficient_sdp_enabled()])
        return inputs[0]

    monkeypatch.setattr("dtlayout.ops.varlen.attend_by_document", attend)
    kernel = replace(find_kernel(AttentionKernel, "sdpa-flash"), offsets=("cpu",))
    bind_attention(kernel)(*make_inputs(2), torch.tensor([0, 8]))
    assert enabled == [[True, False, False]]


def test_documents_come_as_offsets_to_flash_kernels_on_cuda_and_as_a_mask_to_all_others():
    by_offsets = {
        (kernel.name, device) for kernel in KERNELS for device in ("cpu", "cuda") if not kernel.needs_mask(device)
    }
    assert by_offsets == {("sdpa-flash", "cuda"), ("flash-attn", "cuda"), ("fa3", "cuda"), ("fa4", "cuda")}


@on_cpu
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
@on_cpu
def test_only_the_kernel_that_was_asked_for_runs(kernel, dtype, kv_heads):
    with KernelRecorder() as recorder:
        inputs = make_inputs(kv_heads, dtype=dtype)
        causal_attention(*inputs, kernel)
        causal_attention(*inputs, kernel, prepare_mask(Documents.from_starts(STARTS), kernel, inputs[0]))
    assert recorder.executed["attention"] == [RAN[kernel]] and recorder.counts["attention"][RAN[kernel]] == 2


@pytest.mark.filterwarnings("ignore:Flash attention")
def test_inputs_that_flash_does_not_take_are_an_error_and_no_other_kernel_runs():
    q, k, v = make_inputs(4)
    narrow = v[..., :4]  # the math kernel takes values of another width
    assert causal_attention(q, k, narrow, "sdpa-math").shape[-1] == 4
    with KernelRecorder() as recorder, pytest.raises(KernelError) as caught:
        causal_attention(q, k, narrow, "sdpa-flash")
    assert recorder.executed["attention"] == []
    message = str(caught.value)
    assert message.startswith("kernels.attention='sdpa-flash' does not run torch.float64 heads of width 8 on cpu; use ")
    assert "kernels.attention='sdpa-math'" in message


def test_other_failures_keep_their_own_message():
    q, k, v = make_inputs(4)
    with pytest.raises(RuntimeError, match="size") as caught:
        causal_attention(q, k[..., :4], v, "sdpa-math")
    assert not isinstance(caught.value, KernelError)


@pytest.mark.filterwarnings("ignore:.*attention.*", "ignore:Expected query, key and value.*")
@pytest.mark.parametrize("kernel", ["sdpa-efficient", "sdpa-cudnn"])
def test_a_backend_that_is_not_on_this_device_is_an_error_and_gives_way_to_none(kernel):
    with pytest.raises(KernelError, match=f"kernels.attention='{kernel}' does not run torch.float32 heads of width 8"):
        causal_attention(*make_inputs(2, dtype=torch.float32), kernel)


def test_repeated_heads_are_those_that_grouped_queries_read():
    q, k, v = make_inputs(2)
    grouped = causal_attention(q, k, v, "sdpa-math")
    repeated = causal_attention(q, repeat_heads(k, 4), repeat_heads(v, 4), "sdpa-math")
    torch.testing.assert_close(repeated, grouped, rtol=1e-14, atol=1e-14)
    assert repeat_heads(q, 4) is q


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("kernel", [kernel.name for kernel in KERNELS])
def test_on_cuda_each_kernel_is_explicit_softmax_and_no_other_runs(kernel, kv_heads, has_documents):
    if not torch.cuda.is_available():
        pytest.skip(f"{kernel} on CUDA: there is no CUDA device here")
    package = find_kernel(AttentionKernel, kernel).package
    if package and package.module not in find_packages():
        pytest.skip(f"{kernel} on CUDA: its package is not installed")
    if kernel == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fa3 on CUDA: this GPU is no Hopper")
    generator = torch.Generator().manual_seed(0)
    starts = torch.tensor([[0] * 100 + [100] * 156, [0] * 256], dtype=torch.int32)
    shapes = [(2, 4, 256, 64), (2, kv_heads, 256, 64), (2, kv_heads, 256, 64)]
    inputs = [torch.randn(s, generator=generator).bfloat16().cuda().requires_grad_() for s in shapes]
    exact = [t.detach().double().cpu().requires_grad_() for t in inputs]
    expected = explicit_attention(*exact)
    if has_documents:
        expected = causal_attention(*exact, "sdpa-math", make_mask(starts, torch.float64))
    mask = prepare_mask(Documents.from_starts(starts), kernel, inputs[0]) if has_documents else None
    with attention_implementation(kernel), KernelRecorder() as recorder:
        got = causal_attention(*inputs, kernel, mask)
        gradients = torch.autograd.grad(got.sum(), inputs)
    name = kernel.removeprefix("sdpa-")
    assert recorder.executed["attention"] == [name]
    for ours, theirs in zip((got, *gradients), (expected, *torch.autograd.grad(expected.sum(), exact)), strict=True):
        error = (ours.double().cpu() - theirs).norm() / theirs.norm()
        assert error < 0.02, error
