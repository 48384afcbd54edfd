"""Pieces of training joined for modules of one's own: a pipeline of stages, a step of it, adapters beside a model."""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dtlayout.base.errors import DtlayoutError, InvalidConfig, InvalidLayout
from dtlayout.base.formatting import plural
from dtlayout.mesh.axes import PP, TP, axis_sizes
from dtlayout.mesh.build import open_reduction_group
from dtlayout.pipelining.runtime import Runtime, build_runtime
from dtlayout.pipelining.schedule import make_schedule
from dtlayout.pipelining.stage import Boundary
from dtlayout.plans.apply import apply_plan, check_plan
from dtlayout.plans.fsdp import share_context
from dtlayout.plans.plan import Plan, list_parameters
from dtlayout.spec.batch import Batch
from dtlayout.spec.layout import Layout
from dtlayout.training.gradients import clip_gradients, local_squared_norm
from dtlayout.training.result import StepResult


def pipeline(
    stages: Sequence[nn.Module] | nn.Sequential,
    layout: Layout,
    mesh: DeviceMesh,
    example: Tensor,
    *,
    global_batch: int,
    plan: Plan | None = None,
    loss: Callable[..., Tensor] | None = None,
) -> Runtime:
    """Runtime of a model of one's own, cut into the stages of a layout: `runtime.step(inputs, **targets)` trains.

    `stages` are all stages in order, on every rank, or an `nn.Sequential` that is cut into equal numbers of children;
    this rank keeps its own, as `runtime.modules`. Each takes a tensor and gives one, all but the last of one shape. The
    last one gives the loss, of what `step` gets by keyword too; or `loss` makes it of the last one's output and of
    those. Losses of the microbatches, and of data-parallel ranks, add up. `example` has the rows of one microbatch, as
    they enter the first stage; nothing is computed of its values. With a `plan` each stage is sharded by it, and
    gradients are summed over the ranks that have other tokens. Its patterns are names in the whole `nn.Sequential`,
    however it is cut; with a list of stages they are names inside the stages. Build the optimizer after that, of
    `runtime.parameters`. InvalidLayout if there are more or fewer stages, if two stages share a trained parameter (tied
    embeddings), whose gradients nobody would add up, if the batch does not make equal microbatches, or if the mesh is
    of another layout. DtlayoutError if the stages' shapes differ. InvalidConfig for a pattern that matches nothing, and
    without a plan where ranks have other tokens.
    """
    _check_layout(layout, mesh, global_batch)
    if plan is None:
        _check_alone(layout)
    batch = Batch(global_batch=global_batch, seq_len=1)
    schedule = make_schedule(layout, batch)
    whole = _cut(stages, schedule.placement.num_stages)
    _check_shared(whole, () if plan is None else plan.frozen)
    boundary = _find_boundary(whole, example, layout.micro_batch)
    rank = mesh[PP].get_local_rank()
    own = [whole[stage] for stage in schedule.placement.stages_of(rank)]
    sync = []
    if plan is not None:
        check_plan(plan, whole)
        group = open_reduction_group(mesh)
        sync = [apply_plan(module, plan, mesh, group) for module in own]
        share_context(sync)
        boundary = Boundary(shape=boundary.shape, dtype=getattr(torch, plan.precision.compute))
    is_last = schedule.placement.rank_of(len(whole) - 1) == rank
    if loss is not None and is_last:
        own[-1] = _WithLoss(own[-1], loss)
    runtime = build_runtime(own, schedule, sync, mesh, boundary)
    runtime.micro_batch = layout.micro_batch
    return runtime


def train_step(
    runtime: Runtime,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    contexts: Sequence[Any] = (),
    *,
    max_norm: float = math.inf,
    **targets: Any,
) -> StepResult:
    """Train stages of one's own for one step; every rank returns the loss and the gradient norm of the whole model.

    `inputs` [microbatches · B, …] and `targets` are the rows of this data-parallel rank, `contexts` those of
    `Runtime.step`. Gradients are clipped at the norm `max_norm`. A step whose loss or norm is not finite updates
    nothing. For a described model, with documents, routers or a scaled loss, `TrainStep` is the step.
    """
    loss, mesh = runtime.step(inputs, contexts, **targets), runtime.mesh
    parameters = runtime.parameters
    numbers = torch.zeros(2, dtype=torch.float64, device=mesh.device_type)
    if loss is not None:  # every rank of tp knows it
        numbers[0] = loss / mesh[TP].size()
    numbers[1] = local_squared_norm(parameters, mesh)
    dist.all_reduce(numbers)
    norm = numbers[1].sqrt()
    clip_gradients(parameters, norm, max_norm)
    result = StepResult(loss=float(numbers[0]), grad_norm=float(norm), stop_requested=False)
    if result.is_finite:
        optimizer.step()
    optimizer.zero_grad()
    return result


class _Stage(nn.Sequential):
    """Children of an `nn.Sequential` as one stage: each gets the context, and the last one what else the stage gets."""

    def forward(self, input: Any, *context: Any, **targets: Any) -> Any:
        *before, last = self
        for child in before:
            input = child(input, *context)
        return last(input, *context, **targets)


class _WithLoss(nn.Module):
    """A last stage with a function that makes the loss of its output."""

    def __init__(self, module: nn.Module, loss: Callable[..., Tensor]):
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, x: Tensor, *context: Any, **targets: Any) -> Tensor:
        return self.loss(self.module(x, *context), **targets)


def _check_layout(layout: Layout, mesh: DeviceMesh, global_batch: int) -> None:
    """InvalidLayout if a mesh is of other degrees, or if a batch does not make equal microbatches."""
    problems = []
    asked = axis_sizes(layout)
    sizes = {axis: mesh[axis].size() for axis in asked}
    if sizes != asked:
        problems.append(
            f"the layout has {_list_degrees(asked)}, and the mesh {_list_degrees(sizes)}; build the mesh of this layout"
        )
    rows = layout.dp * layout.micro_batch
    if global_batch < 1 or global_batch % rows:
        problems.append(
            f"global_batch={global_batch} makes no equal microbatches: bring a multiple of {rows}, of dp={layout.dp} · "
            f"micro_batch={layout.micro_batch}"
        )
    if problems:
        raise InvalidLayout(problems)


def _check_alone(layout: Layout) -> None:
    """InvalidConfig if ranks have other tokens than others: without a plan nothing sums their gradients."""
    if (count := layout.dp * layout.cp) > 1:
        raise InvalidConfig(
            f"plan=None sums no gradients over the {count} ranks of dp={layout.dp} · cp={layout.cp}, and each would "
            f'train a model of its own; give a plan: Plan({{}}, blocks="", units=(), zero=1, '
            f'precision=Precision(compute="float32")) splits the optimizer\'s state alone'
        )


def _list_degrees(degrees: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in degrees.items())


def _check_shared(stages: Sequence[nn.Module], frozen: Sequence[str]) -> None:
    """InvalidLayout with a line for each trained parameter that several stages share; `frozen` are a plan's patterns.

    Each stage would update a copy of its own by its own uses alone. `training.step` adds them up for described models.
    """
    places: dict[nn.Parameter, list[tuple[int, str]]] = {}
    trained: set[nn.Parameter] = set()
    for number, stage in enumerate(stages):
        still = set(list_parameters(stage, frozen))
        for name, parameter in stage.named_parameters():
            places.setdefault(parameter, []).append((number, name))
            if parameter.requires_grad and name not in still:
                trained.add(parameter)
    problems = []
    for parameter, found in places.items():
        if len(found) > 1 and parameter in trained:
            those = " and ".join(f"stage {number} as {name!r}" for number, name in found)
            problems.append(
                f"{those} share one trained parameter, and each would train it with its own gradient alone; keep it in "
                f"one stage, give each stage its own, or freeze it"
            )
    if problems:
        raise InvalidLayout(problems)


def _cut(stages: Sequence[nn.Module] | nn.Sequential, num_stages: int) -> list[nn.Module]:
    """The stages; those of an `nn.Sequential` keep the names of its children, one child or more."""
    if isinstance(stages, nn.Module) and not isinstance(stages, nn.Sequential | nn.ModuleList):
        raise InvalidLayout(
            f"{type(stages).__name__} is one module, and nothing says where to cut it; bring a list of stages, or an "
            f"nn.Sequential"
        )
    whole = list(stages)
    if isinstance(stages, nn.Sequential) and len(whole) >= num_stages:
        children = list(stages.named_children())
        ends = [len(children) * (i + 1) // num_stages for i in range(num_stages)]
        starts = [0, *ends[:-1]]
        return [_Stage(OrderedDict(children[i:j])) for i, j in zip(starts, ends, strict=True)]
    if len(whole) != num_stages:
        raise InvalidLayout(
            f"the layout has {plural(num_stages, 'stage')}, and here are {len(whole)}; bring one module for each, or "
            f"an nn.Sequential of at least {num_stages} children"
        )
    return whole


def _find_boundary(stages: Sequence[nn.Module], example: Tensor, micro_batch: int) -> Boundary:
    """Shape and format of what goes from stage to stage, found without computing; DtlayoutError if it is not one."""
    if example.shape[0] != micro_batch:
        raise DtlayoutError(
            f"the example has {plural(example.shape[0], 'row')}, and a microbatch of this layout {micro_batch}; "
            f"bring the rows of one microbatch"
        )
    x, found = example.to("meta"), Boundary(shape=(0,), dtype=example.dtype)
    for number, stage in enumerate(stages[:-1]):
        tensors = [*stage.named_parameters(), *stage.named_buffers()]
        with torch.no_grad():
            x = torch.func.functional_call(stage, {name: each.to("meta") for name, each in tensors}, (x,))
        if number and (tuple(x.shape), x.dtype) != (found.shape, found.dtype):
            raise DtlayoutError(
                f"stage {number} gives {tuple(x.shape)} {x.dtype}, and stage 0 {found.shape} {found.dtype}; cut the "
                f"model where it hands on tensors of one shape"
            )
        found = Boundary(shape=tuple(x.shape), dtype=x.dtype)
    return found
