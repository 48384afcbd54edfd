"""The module of a pipeline stage, and the tensors that go from one stage to the next."""

import pkgutil
from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import nn

from dtlayout.models.families import find_family
from dtlayout.pipelining.partition import StageSlice
from dtlayout.spec.batch import Batch
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import Precision


@dataclass(frozen=True)
class Boundary:
    """Shape and format of the tensor that one stage hands to the next for a microbatch, and of its gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def build_stage(
    model: ModelShape,
    kernels: Kernels,
    precision: Precision,
    batch: Batch,
    stage: StageSlice,
    left_out: Container[int] = (),
) -> nn.Module:
    """The stage's part of the model without `left_out` blocks, on the meta device, in the master weights' dtype."""
    module = find_family(model.family).module
    build = pkgutil.resolve_name(module) if isinstance(module, str) else module
    with torch.device("meta"):
        return build(
            model, kernels, batch.seq_len, layers=[i for i in stage.layers if i not in left_out],
            embedding=stage.embedding, head=stage.head, dtype=getattr(torch, precision.params),
        )  # fmt: skip


def stage_boundary(model: ModelShape, layout: Layout, batch: Batch, precision: Precision) -> Boundary:
    """Hidden states of a microbatch, [B, s, D], where s are a cp rank's tokens.

    With sequence parallelism each tp rank sends its part of them, and s is that part.
    """
    local_seq_len = batch.seq_len // layout.cp // (layout.tp if layout.shards_sequence else 1)
    return Boundary((layout.micro_batch, local_seq_len, model.hidden_size), getattr(torch, precision.compute))
