"""What a dry run executes of a config, and as which ranks. No torch."""

from dataclasses import replace

from dtlayout.cluster import Gpu
from dtlayout.config import Config
from dtlayout.costmodel.estimate import Estimate
from dtlayout.errors import InvalidConfig
from dtlayout.kernels import Kernels, needs_mask
from dtlayout.layout import Layout
from dtlayout.planner.prediction import predicted_kernels


def choose_kernels(config: Config, layout: Layout, gpu: Gpu) -> tuple[Kernels, list[str]]:
    """Those that a dry run executes, and what it leaves out; InvalidConfig for what it cannot do."""
    kernels, notes = predicted_kernels(config, gpu), []
    kernels.check(config.precision, gpu.device_type, tp=layout.tp, recompute=layout.recompute)
    problems = [
        f"kernels.{name}=liger is a Triton kernel, which a dry run cannot execute; use --kernels.{name}={instead}"
        for name, instead in (("norm", "fused"), ("rope", "eager"), ("swiglu", "eager"))
        if getattr(kernels, name) == "liger"
    ]
    if config.data.document_mask and needs_mask(kernels.attention, gpu.device_type):
        problems.append(
            f"data.document_mask makes masks of the data for kernels.attention={kernels.attention}, and a dry run has "
            f"no data; use --data.document_mask=false"
        )
    if problems:
        raise InvalidConfig(problems)
    if config.data.document_mask:
        notes.append("data.document_mask is left out: the offsets of documents are a few kilobytes")
    if kernels.compile != "none":
        notes.append(f"kernels.compile={kernels.compile} is left out: this is the memory of eager blocks")
    return replace(kernels, compile="none"), notes


def default_ranks(layout: Layout, estimate: Estimate) -> list[int]:
    """The first, the last, and the first of the stage that is predicted to hold most."""
    per_stage = layout.world_size // layout.pp
    return sorted({0, estimate.busiest_rank * per_stage, layout.world_size - 1})
