"""Decoder layers alone, trained: a stage without embedding and head that is first and last at once.

In place of a loss it takes the gradient of its output, as a stage inside a pipeline does.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cells import Training
from dtlayout.mesh.build import build_mesh
from dtlayout.models.llama import Llama
from dtlayout.pipelining.runtime import build_runtime
from dtlayout.pipelining.schedule import make_schedule
from dtlayout.pipelining.stage import stage_boundary
from dtlayout.plans.apply import apply_plan
from dtlayout.plans.init import initialize
from dtlayout.plans.plan import Plan, make_plan, match_names
from dtlayout.spec.precision import Precision
from dtlayout.training.build import Assembly


class Blocks(Llama):
    """Hidden states [B, S, D] go in; backward begins with `targets` [B, S, D], the gradient of what comes out."""

    def forward(  # type: ignore[override]  # of documents they know nothing
        self, x: Tensor, *, targets: Tensor | None = None, num_targets: Tensor | float = 1.0
    ) -> Tensor:
        loss: Tensor = _GivenGradient.apply(super().forward(x), targets)
        return loss


class _GivenGradient(torch.autograd.Function):
    """A scalar whose gradient is what it is told."""

    @staticmethod
    def forward(ctx: Any, h_BSD: Tensor, gradient_BSD: Tensor) -> Tensor:
        ctx.save_for_backward(gradient_BSD)
        return h_BSD.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        (gradient_BSD,) = ctx.saved_tensors
        return gradient_BSD, None


def assemble_blocks(cell: Training, precision: Precision, *, seed: int, device_type: str) -> Assembly:
    """The blocks of a cell, assembled as `training.build.assemble` does with a whole model."""
    shape, batch, layout = cell.shape, cell.batch, cell.layout
    plan = make_plan(shape, layout, cell.kernels, precision)
    if not cell.adds_in_matmuls:
        plan = replace(plan, summed=())
    schedule = make_schedule(layout, batch)
    mesh = build_mesh(layout, device_type)
    with torch.device("meta"):
        module = Blocks(
            shape,
            cell.kernels,
            batch.seq_len,
            layers=cell.stage.layers,
            embedding=cell.stage.embedding,
            head=cell.stage.head,
            dtype=getattr(torch, precision.params),
        )
    sync = apply_plan(module, _keep_own(plan, module), mesh)
    initialize([module], shape, seed, device_type)
    runtime = build_runtime([module], schedule, [sync], mesh, stage_boundary(shape, layout, batch, precision))
    return Assembly(mesh, schedule, [cell.stage], [module], runtime, [sync])


def _keep_own(plan: Plan, blocks: Blocks) -> Plan:
    """A plan without what it says of modules before and after the blocks."""
    names = [name for name, _ in blocks.named_modules()]
    units = tuple(unit for unit in plan.units if any(match_names(each, names) for each in unit))
    return replace(plan, units=units, summed=tuple(each for each in plan.summed if match_names(each, names)))
