"""What ran is what is counted, by the names that PyTorch and the packages give their kernels."""

from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity
from torch.utils.checkpoint import checkpoint

from dtlayout.measure import kernels
from dtlayout.measure.kernels import KernelRecorder, _match, list_traces
from dtlayout.ops.grouped import GROUPED, LOOP, multiply_groups
from dtlayout.ops.scaled_groups import SCALED_LOOPS


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize(("backend", "kernel"), [(SDPBackend.MATH, "math"), (SDPBackend.FLASH_ATTENTION, "flash")])
def test_each_forward_call_counts_as_the_kernel_that_ran(backend, kernel, num_kv_heads, is_causal, dtype):
    q = torch.randn(1, 4, 8, 16, dtype=dtype, requires_grad=True)
    k = torch.randn(1, num_kv_heads, 8, 16, dtype=dtype, requires_grad=True)
    with KernelRecorder() as recorder, sdpa_kernel(backend):
        for _ in range(3):
            scaled_dot_product_attention(q, k, k, is_causal=is_causal, enable_gqa=num_kv_heads < 4).sum().backward()
    assert recorder.counts["attention"] == {kernel: 3}
    assert recorder.executed == {"attention": [kernel], "norm": [], "rope": [], "swiglu": [], "experts": []}


def test_masked_math_attention_is_math():
    q = torch.randn(1, 2, 8, 16)
    with KernelRecorder() as recorder, sdpa_kernel(SDPBackend.MATH):
        scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(8, 8).tril().bool())
    assert recorder.executed["attention"] == ["math"]


def test_a_recomputed_call_counts_again():
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    with KernelRecorder() as recorder, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        checkpoint(scaled_dot_product_attention, q, q, q, use_reentrant=False).sum().backward()
    assert recorder.counts["attention"] == {"flash": 2}


def test_norm_and_activation_have_names_where_they_are_one_operation():
    x = torch.randn(4, 8, requires_grad=True)
    with KernelRecorder() as recorder:
        F.silu(F.rms_norm(x, (8,))).sum().backward()
    assert (recorder.executed["norm"], recorder.executed["swiglu"]) == (["fused"], ["eager"])


@pytest.mark.parametrize(
    ("kernel", "name"), [(GROUPED, "grouped"), (LOOP, "loop"), (SCALED_LOOPS["fp8-tensorwise"], "loop")]
)
def test_matmuls_of_experts_have_the_name_of_their_kernel(kernel, name):
    ends = torch.tensor([1, 4], dtype=torch.int32)
    with KernelRecorder() as recorder:
        multiply_groups(torch.randn(4, 16), torch.randn(2, 16, 16), ends, kernel)
    assert recorder.counts["experts"] == {name: 1}


def test_other_operators_are_none_of_them():
    with KernelRecorder() as recorder:
        torch.randn(4, 4).softmax(-1) @ torch.randn(4, 4).pow(2).mean(-1, keepdim=True).rsqrt()
    assert recorder.executed == {operation: [] for operation in list_traces()}


def test_what_ran_before_an_error_is_counted_and_the_next_recorder_starts_at_zero():
    q = torch.randn(1, 2, 8, 16)
    recorder = KernelRecorder()
    with pytest.raises(ValueError, match="stop"), recorder, sdpa_kernel(SDPBackend.MATH):
        scaled_dot_product_attention(q, q, q)
        raise ValueError("stop")
    assert recorder.executed["attention"] == ["math"]
    with KernelRecorder() as later:
        q + q
    assert later.executed["attention"] == []


class Attention(nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, q, q, is_causal=True)


def test_compiled_code_counts_when_it_runs_and_not_while_it_is_traced():
    q = torch.randn(1, 2, 8, 16)
    compiled = torch.compile(Attention(), backend="aot_eager", fullgraph=True)
    with KernelRecorder() as first:
        compiled(q)
    with KernelRecorder() as second:
        compiled(q)
    assert first.counts == second.counts
    assert second.counts["attention"] == {"flash": 1}


@pytest.mark.parametrize(
    ("name", "operation", "kernel"),
    [
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 64, 4>>(pytorch_flash"
         "::Flash_fwd_params)", "attention", "flash"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 64>>(pytorch_flash::"
         "Flash_fwd_params)", "attention", "flash"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(flash::Flash_fwd_params)", "attention",
         "flash-attn"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwd"
         "Sm90<2>>>>(flash::FlashAttnFwdSm90::Params)", "attention", "fa3"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)", "attention",
         "efficient"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "attention", "cudnn"),
        ("_rms_norm_forward_kernel", "norm", "liger"),
        ("_block_rms_norm_forward_kernel", "norm", "liger"),
        ("_triton_rope", "rope", "liger"),
        ("_swiglu_forward_kernel", "swiglu", "liger"),
    ],
)  # fmt: skip
def test_a_kernel_on_cuda_has_one_meaning(name, operation, kernel):
    assert list(_match([name])) == [(name, operation, kernel)]


@pytest.mark.parametrize(
    "name",
    [
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd_kernel_traits<128>>",
        "void flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<128>>(flash::Flash_bwd_params)",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBwdSm90<flash::CollectiveMainloopBwdSm90<2>>>>",
        "fmha_cutlassB_f32_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64",
        "_rms_norm_backward_kernel",
        "_swiglu_backward_kernel",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "aten::silu_backward",
    ],
)
def test_backward_and_what_has_several_implementations_tell_nothing(name):
    assert list(_match([name])) == []


@pytest.mark.parametrize("has_cuda", [False, True])
def test_where_there_is_a_gpu_its_kernels_are_profiled_too(monkeypatch, has_cuda):
    asked = MagicMock()
    monkeypatch.setattr(kernels, "profile", asked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    KernelRecorder().__enter__()
    on_device = [ProfilerActivity.CUDA] if has_cuda else []
    assert asked.call_args.kwargs["activities"] == [ProfilerActivity.CPU, *on_device]
