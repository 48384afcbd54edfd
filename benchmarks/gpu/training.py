"""Steps of the trainer: of a whole model as `training.build` assembles it, or of blocks alone."""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.blocks import assemble_blocks
from benchmarks.gpu.cells import Training
from benchmarks.gpu.rows import Trained
from dtlayout.base.errors import DtlayoutError
from dtlayout.calibrate.clock import time_repeats
from dtlayout.measure.kernels import KernelRecorder
from dtlayout.measure.memory import StorageTracker
from dtlayout.spec.device import Device
from dtlayout.spec.kernel_records import KernelRequest
from dtlayout.spec.optimizers import AdamW
from dtlayout.spec.precision import Precision
from dtlayout.training.build import Assembly, assemble
from dtlayout.training.kernels import first_forward
from dtlayout.training.optimizer import build_optimizer, set_learning_rate
from dtlayout.training.result import StepResult
from dtlayout.training.step import TrainStep

SEED, LEARNING_RATE, MAX_NORM = 0, 1e-4, 1.0
PRECISION = Precision()


class NonFiniteLoss(DtlayoutError):
    """The loss or the gradient norm of a measured step became NaN or infinite."""


def measure_training(cell: Training, device: Device, num_steps: int) -> Trained:
    """Build the trainer of a cell and time its steps: a first one, one whose first forward is profiled, then others."""
    cell.kernels.check(KernelRequest(device=device, compute=PRECISION.compute))
    cell.layout.check(cell.shape, cell.batch)
    assembly, inputs, targets = prepare(cell, device.type)
    optimizer = build_optimizer(assembly.modules, cell.shape, AdamW(state_format=cell.state_format))
    set_learning_rate(optimizer, LEARNING_RATE)
    train_step = TrainStep(assembly.runtime, optimizer, max_norm=MAX_NORM, mesh=assembly.mesh, model=cell.shape)
    train_step.divides_in_update &= cell.clips_in_update
    results: list[StepResult] = []

    def step() -> None:
        results.append(train_step(inputs, targets))

    first_step_s = time_repeats(step, 1, device.type)
    with first_forward(assembly.runtime, recorder := KernelRecorder()):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times_s = [time_repeats(step, 1, device.type) for _ in range(num_steps)]
    result = results[-1]
    if not result.is_finite:
        raise NonFiniteLoss(f"loss {result.loss}, gradient norm {result.grad_norm}")

    step_time_s = statistics.median(times_s)
    tokens_per_s = cell.batch.num_tokens / step_time_s
    flops_per_s = tokens_per_s * cell.flops_per_token
    return Trained(
        first_step_s=first_step_s,
        step_time_s=step_time_s,
        slowest_step_s=max(times_s),
        tokens_per_s=tokens_per_s,
        model_tflops_per_gpu=flops_per_s / 1e12,
        mfu=flops_per_s / device.peak_flops_per_s if device.peak_flops_per_s else None,
        peak_memory_bytes=peak_bytes(step, StorageTracker(assembly.modules, [optimizer]), device.type),
        attention_kernels=tuple(recorder.executed["attention"]),
        loss=result.loss if cell.num_blocks is None else None,
    )


def prepare(cell: Training, device_type: str) -> tuple[Assembly, Tensor, Tensor]:
    """The assembled trainer, its inputs, and its targets: the tokens that follow, or blocks' output gradient."""
    if cell.num_blocks is not None:
        assembly = assemble_blocks(cell, PRECISION, seed=SEED, device_type=device_type)
        shape = (cell.global_batch, cell.seq_len, cell.shape.hidden_size)
        dtype = getattr(torch, PRECISION.compute)
        hidden, gradient = (torch.randn(shape, dtype=dtype, device=device_type) for _ in range(2))
        return assembly, hidden, gradient / cell.batch.num_tokens
    assembly = assemble(
        cell.shape, cell.batch, cell.layout, cell.kernels, PRECISION, seed=SEED, device_type=device_type
    )
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(cell.shape.vocab_size, (cell.global_batch, cell.seq_len + 1), generator=generator)
    tokens = tokens.to(device_type)
    return assembly, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def peak_bytes(step: Callable[[], None], tracker: StorageTracker, device_type: str) -> int:
    """The most that was allocated since the statistics began; where torch has no allocator to ask, of one step more."""
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    with tracker:
        step()
    return tracker.ledger.peak_bytes
