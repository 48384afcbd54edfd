"""Ceilings: speeds that the device reaches in one operation alone, a matmul, a copy or attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cells import AttentionCall, Ceiling, Copy, Matmul
from benchmarks.gpu.rows import Reached
from dtlayout.calibrate.clock import time_together
from dtlayout.models.presets import find_preset
from dtlayout.ops.attention import causal_attention
from dtlayout.spec.device import Device, DeviceType

Operation = Callable[[], Any]


def measure_ceiling(cell: Ceiling, device: Device) -> Reached:
    """Run a cell's operation on random data."""
    seconds = time_together(PREPARE[type(cell)](cell, device.type), device.type)
    per_second = cell.work / seconds
    gpu = None if device.type == "cpu" else device.gpu
    best = None if gpu is None else {"TFLOP/s": gpu.peak_flops_per_s, "GB/s": gpu.memory_bytes_per_s}[cell.unit]
    return Reached(median_s=seconds, per_second=per_second, share=per_second / best if best else None)


def prepare_matmul(cell: Matmul, device_type: str) -> Operation:
    """The product, into memory that is there."""
    a, b = _random(cell.m, cell.k, device=device_type), _random(cell.n, cell.k, device=device_type)
    out = torch.empty(cell.m, cell.n, dtype=a.dtype, device=device_type)
    return lambda: torch.mm(a, b.T, out=out)  # a linear layer's weight is [n, k]


def prepare_copy(cell: Copy, device_type: str) -> Operation:
    """The copy."""
    source = torch.empty(cell.num_bytes, dtype=torch.uint8, device=device_type).random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def prepare_attention(cell: AttentionCall, device_type: DeviceType) -> Operation:
    """Forward without autograd's bookkeeping, or backward alone."""
    model = find_preset(cell.model)
    heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads)
    # Transposed as the model's own.
    inputs = [_random(1, cell.seq_len, n, model.head_width, device=device_type).transpose(1, 2) for n in heads]
    q, k, v = (x.requires_grad_(cell.direction == "backward") for x in inputs)
    out = causal_attention(q, k, v, cell.kernel)
    if cell.direction == "forward":
        return lambda: causal_attention(q, k, v, cell.kernel)
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


PREPARE: dict[type, Callable[..., Operation]] = {
    Matmul: prepare_matmul,
    Copy: prepare_copy,
    AttentionCall: prepare_attention,
}


def _random(*shape: int, device: str) -> Tensor:
    """Zeros would draw less power, and so be faster."""
    return torch.randn(shape, dtype=torch.bfloat16, device=device)
