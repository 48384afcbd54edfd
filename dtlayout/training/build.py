"""From values to something that trains: the whole of building a trainer, without an `if` about parallelism."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtlayout.mesh.axes import PP
from dtlayout.mesh.build import build_expert_mesh, build_mesh, data_mesh, open_reduction_group, token_mesh
from dtlayout.pipelining.partition import StageSlice, layer_costs, partition
from dtlayout.pipelining.runtime import Runtime, build_runtime
from dtlayout.pipelining.schedule import Schedule, make_schedule
from dtlayout.pipelining.stage import build_stage, stage_boundary
from dtlayout.plans.apply import apply_plan
from dtlayout.plans.disk import DiskState
from dtlayout.plans.fsdp import GradientSync, share_context
from dtlayout.plans.init import initialize, move_tables
from dtlayout.plans.offload import ActivationOffloader
from dtlayout.plans.plan import make_plan
from dtlayout.spec.batch import Batch
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import Precision


@dataclass(frozen=True)
class Assembly:
    """Everything that one rank trains with."""

    mesh: DeviceMesh
    schedule: Schedule
    slices: list[StageSlice]
    modules: list[nn.Module]
    runtime: Runtime
    sync: list[GradientSync]
    """One for each of the modules."""
    other_groups: Sequence[dist.ProcessGroup | None] = ()
    """Groups of a step beside those of the mesh's axes; None for one that this layout has not."""
    disk: DiskState | None = None
    """The state where it lies on disk."""


def assemble(
    model: ModelShape,
    batch: Batch,
    layout: Layout,
    kernels: Kernels,
    precision: Precision,
    *,
    seed: int,
    device_type: str,
    timeout_s: float = 0.0,
    give_weights: Callable[[Sequence[nn.Module], ModelShape, int, str], None] = initialize,
    left_out: Container[int] = (),
    schedule: Schedule | None = None,
) -> Assembly:
    """Build this rank's stages of a legal layout, with their initial weights, and the runtime that steps them.

    Nothing has memory until `give_weights` gets the sharded stages, the model, `seed` and the device on which their
    parameters lie. `timeout_s` is that of `build_mesh`. Where the layout has the state on disk, parameters lie in files
    of its `offload_folder` by then; without a folder, as in a dry run, they lie in memory. For a dry run: blocks in
    `left_out` are not built, which is no model any more, and `schedule`, by default the layout's own, may lack actions.
    """
    plan = make_plan(model, layout, kernels, precision)
    schedule = schedule or make_schedule(layout, batch)
    slices = partition(layer_costs(model, batch), layout)
    mesh = build_mesh(layout, device_type, timeout_s)
    if plan.balances_by_loss:
        token_mesh(mesh, timeout_s)
    stages = schedule.placement.stages_of(mesh[PP].get_local_rank())
    modules: list[nn.Module] = [
        build_stage(model, kernels, precision, batch, slices[stage], left_out) for stage in stages
    ]
    reduction_group = open_reduction_group(mesh, timeout_s)
    experts = build_expert_mesh(layout, device_type, timeout_s) if plan.experts else None
    kept = ActivationOffloader(device_type) if plan.offloads_activations else None
    sync = [apply_plan(module, plan, mesh, reduction_group, kept, experts) for module in modules]
    share_context(sync)
    disk = None
    if plan.has_state_on_disk:
        disk = DiskState([unit for each in sync for unit in each.units], layout.offload_folder)
        disk.place_parameters(modules)
    give_weights(modules, model, seed, "cpu" if plan.offloads_state else device_type)
    if plan.offloads_state:
        move_tables(modules, device_type)
    if disk:
        disk.settle()
    runtime = build_runtime(modules, schedule, sync, mesh, stage_boundary(model, layout, batch, precision))
    if kept is not None:
        runtime.before_work = kept.before_work
    others = [*data_mesh(mesh).get_all_groups(), reduction_group]
    if experts:
        others += [experts.ep.get_group(), *experts.shards.mesh.get_all_groups(), experts.shards.reduction_group]
    return Assembly(mesh, schedule, slices, modules, runtime, sync, others, disk)
