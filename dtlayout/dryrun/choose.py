"""Choice of the kernels that a dry run of a config executes, and of the ranks that it runs. No torch."""

from dataclasses import replace

from dtlayout.base.errors import InvalidConfig
from dtlayout.config.config import Config
from dtlayout.costmodel.estimate import Estimate
from dtlayout.planner.prediction import predicted_kernels
from dtlayout.spec.cluster import Gpu
from dtlayout.spec.device import Device
from dtlayout.spec.kernel_records import AttentionKernel, Kernel
from dtlayout.spec.kernel_table import find_kernel
from dtlayout.spec.kernels import Kernels, find_alternative
from dtlayout.spec.layout import Layout


def has_stand_in(kernel: Kernel) -> bool:
    """Whether an operator of the CPU keeps the same tensors as this kernel does on CUDA: dryrun/operators.py."""
    return isinstance(kernel, AttentionKernel) and not kernel.holds_scores


def choose_kernels(config: Config, layout: Layout, gpu: Gpu) -> tuple[Kernels, list[str]]:
    """Kernels that a dry run executes, and sentences about what it leaves out; InvalidConfig for what it cannot do."""
    kernels, notes = predicted_kernels(config, layout, gpu), []
    problems = [
        f"kernels.{kernel.operation}={kernel.name} runs on CUDA alone, and a dry run executes it on no GPU; "
        f"use --kernels.{kernel.operation}={find_alternative(kernel, config.precision.compute, Device('cpu'))}"
        for kernel in kernels.records
        if not kernel.cpu and not has_stand_in(kernel)
    ]
    attention = find_kernel(AttentionKernel, kernels.attention)
    if config.data.document_mask and attention.needs_mask(gpu.device_type):
        problems.append(
            f"data.document_mask makes masks of the data for kernels.attention={kernels.attention}, and a dry run has "
            f"no data; use --data.document_mask=false"
        )
    if problems:
        raise InvalidConfig(problems)
    if config.data.document_mask:
        notes.append("data.document_mask is left out: the offsets of documents are a few kilobytes")
    if kernels.compile != "none":
        notes.append(f"kernels.compile={kernels.compile} is left out: memory and time are those of eager blocks")
    return replace(kernels, compile="none"), notes


def default_ranks(layout: Layout, estimate: Estimate) -> list[int]:
    """The first rank, the last one, and the first one of the stage that is predicted to hold most."""
    per_stage = layout.world_size // layout.pp
    return sorted({0, estimate.busiest_rank * per_stage, layout.world_size - 1})


_MAY_BE_FULLEST = 0.75
"""Share of the highest predicted peak. A rank that is predicted below it never has the highest peak: the worst formulas
of random layouts (benchmarks/peaks.md), one too high and one too low, are closer together than that."""


def fullest_ranks(layout: Layout, estimate: Estimate) -> list[int]:
    """Global numbers of the ranks to run: the first rank of each pipeline rank that may have the highest peak.

    These are the pipeline rank with the highest predicted peak, and the first and the last one if they are predicted at
    `_MAY_BE_FULLEST` of that or more. Where shards are uneven, those of the first rank are largest.
    """
    per_stage = layout.world_size // layout.pp
    ends = {rank for rank in (0, layout.pp - 1) if estimate.memory[rank].total >= _MAY_BE_FULLEST * estimate.peak_bytes}
    return sorted(rank * per_stage for rank in ends | {estimate.busiest_rank})
