"""FSDP2 as the data-parallel layer: sharded master weights, mixed precision and the ZeRO stages.

It is applied at dp = 1 too, since it carries mixed precision. Gradients are summed over the ranks, never averaged: the
loss is already divided by the tokens of the global batch.

ZeRO stages (arXiv:1910.02054), for m microbatches and u units; collectives of a rank in a step:

| zero | parameters between uses | gradients | all-gathers | reduce-scatters |
|---|---|---|---|---|
| 1 | gathered once a step | whole until the last backward | u | u |
| 2 | gathered once a step | sharded after each backward | u | m·u |
| 3 | gathered for each forward and backward | sharded after each backward | 2·m·u, where the head is m less | m·u |

Backward begins with final norm and head: under zero 3 they, or where the embedding is tied all of the root, stay
gathered from a forward until a backward is over. With HSDP the shards are summed over dp_replicate once a step, after
the last backward.

Where the host has the state (ZeRO-Offload, arXiv:2101.06840), a unit's shards are copied to the device to be gathered,
and its summed gradients back from there; the optimizer works on the host. Shards may be pages of files there (disk.py).
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    share_comm_ctx,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from dtlayout.mesh.axes import DP_REPLICATE, TP
from dtlayout.mesh.build import ExpertMesh, ShardMesh, data_mesh
from dtlayout.models.description import EMBEDDING, HEAD
from dtlayout.plans.cast_gather import CastGathers, gather_cast
from dtlayout.plans.experts import place_shards
from dtlayout.plans.plan import Plan, list_parameters, match_names
from dtlayout.plans.weight_sums import add_in_matmuls


@dataclass
class GradientSync:
    """When a sharded module sums its gradients and lets go of its gathered parameters."""

    units: tuple[FSDPModule, ...]
    """All of them, the root last."""
    each_backward: bool
    """Reduce-scatter after every microbatch (zero 2 and 3), or after the last alone (zero 1)."""
    keep_gathered: bool
    """Keep parameters gathered until the last backward (zero 1 and 2), or until each backward is over (zero 3)."""
    is_replicated: bool
    """Whether there are several copies of the shards (HSDP)."""
    reductions: tuple[DefaultReduceScatter, ...]
    """FSDP2's hook that sums gradients over the shards, for each unit."""
    summed: tuple[nn.Module, ...] = ()
    """Linear layers whose matmuls add their weights' gradients to the sum over microbatches."""
    casts: CastGathers | None = None
    """The weights that are gathered in fp8; None where there are none."""

    def expect_microbatches(self, number: int) -> None:
        """Call once where a step has so many backwards of the module; the plan's matmuls then add to their sums."""
        if number > 1:
            add_in_matmuls(self.units, self.summed)

    def expect_split_backwards(self) -> None:
        """Call once where backwards come in two parts.

        FSDP2 adds up what is still to be summed over copies as one buffer for each unit, and the second part of a
        backward has no gradients of norms to put there: with copies all is summed after the last one.
        """
        self.each_backward = self.each_backward and not self.is_replicated

    def before_backward(self, *, is_last: bool) -> None:
        """Call before each microbatch's backward; `is_last` for the last one of the step on this module."""
        for unit in self.units:
            unit.set_requires_gradient_sync(self.each_backward or is_last, recurse=False)
            unit.set_requires_all_reduce(is_last, recurse=False)
            unit.set_reshard_after_backward(is_last or not self.keep_gathered, recurse=False)
        self.units[-1].set_is_last_backward(is_last)
        if is_last and self.casts:
            self.casts.are_stale = True  # an update follows

    def before_input_backward(self) -> None:
        """Call before the first part of a backward that is split: its gradients wait for those of the weights."""
        for unit in self.units:
            unit.set_requires_gradient_sync(False, recurse=False)
            unit.set_reshard_after_backward(not self.keep_gathered, recurse=False)
        self.units[-1].set_is_last_backward(False)

    def after_weight_backward(self, *, is_last: bool) -> None:
        """Call after the second part of a backward that is split; `is_last` as for a whole one.

        FSDP2 ends a backward where autograd's pass ends. It has seen none here, and so takes all of its units for ones
        whose backward is over: adds their gradients up in the reduce format, as the first part did with those that it
        had, and sums them over the ranks where it is time to.
        """
        self.before_input_backward()
        self.end_backward()
        if self.each_backward or is_last:
            self.before_backward(is_last=is_last)
            self.end_backward()

    def end_backward(self) -> None:
        """Call after a backward through which autograd made no pass; FSDP2 ends its own backward there."""
        fully_shard.state(self.units[-1])._root_post_backward_final_callback()  # type: ignore[attr-defined]

    def observe(self, around: Callable[[str], AbstractContextManager[None]]) -> None:
        """Do each all-gather and reduce-scatter from now on inside of what `around` makes of "gather" or "reduce".

        On CUDA that is on the stream on which it runs; sums over copies (HSDP) are not observed.
        """
        for unit, reduction in zip(self.units, self.reductions, strict=True):
            unit.set_custom_all_gather(_Observed(DefaultAllGather(), lambda: around("gather")))
            unit.set_custom_reduce_scatter(_Observed(reduction, lambda: around("reduce")))

    def before_gathers(self) -> None:
        """Call on all ranks before units are gathered outside of a forward, which does it itself."""
        if self.casts:
            self.casts.find_scales()

    def after_evaluation(self) -> None:
        """Call after forwards that no backward follows, which would have let go of gathered parameters."""
        for unit in self.units:
            unit.reshard()
        if self.casts:
            self.casts.are_stale = True


class _ReduceScatter(DefaultReduceScatter):
    """FSDP2's, in another group of the same ranks."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):  # type: ignore[no-untyped-def]
        return super().__call__(output_tensor, input_tensor, self.group, op, async_op)


class _Observed(AllGather, ReduceScatter):
    """A collective of FSDP2's, done inside of what `around` makes."""

    def __init__(self, collective: AllGather | ReduceScatter, around: Callable[[], AbstractContextManager[None]]):
        self._collective, self._around = collective, around

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._collective.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        with self._around():
            return self._collective(*args, **kwargs)


def shard(
    module: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    reduction_group: dist.ProcessGroup | None = None,
    experts: ExpertMesh | None = None,
) -> GradientSync:
    """Shard the plan's units, then the rest with the root, over the data-parallel axes; experts over `experts`.

    Gradients are reduced over dp_shard in the mesh's own group, or else in `reduction_group`.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, plan.precision.compute),
        reduce_dtype=getattr(torch, plan.precision.reduce),
        cast_forward_inputs=False,  # stages and embeddings hand on what they compute
    )
    names = [name for name, _ in module.named_modules()]
    groups = [group for unit in plan.units for group in _members(unit, names)]
    data, of_experts = ShardMesh(data_mesh(mesh), reduction_group), set(match_names(plan.experts, names))
    counters = {module.get_parameter(name) for name in list_parameters(module, plan.counters)}
    in_order = sorted(groups, key=lambda members: names.index(members[0]))
    for members in [*groups, [""]]:  # the root comes last
        reshards = plan.zero == 3 and HEAD not in (names if members == [""] else members)
        where = experts.shards if experts and members[0] in of_experts else data
        fully_shard(
            [module.get_submodule(name) for name in members], mesh=where.mesh, reshard_after_forward=reshards,
            shard_placement_fn=partial(place_shards, mesh=where.mesh),
            mp_policy=policy, offload_policy=_find_offload(plan, mesh.device_type), ignored_params=counters,
        )  # fmt: skip
    units, reductions = list[FSDPModule](), list[DefaultReduceScatter]()
    for name in (*(members[0] for members in in_order), ""):
        where = experts.shards if experts and name in of_experts else data
        unit, reduction = _as_unit(module.get_submodule(name)), _make_reduction(where.reduction_group)
        if where.mesh.size() > 1:  # one rank divides by nothing, and would make a buffer for it
            unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        if where.reduction_group is not None:
            unit.set_custom_reduce_scatter(reduction)
        units.append(unit)
        reductions.append(reduction)
    casts = None
    if plan.gathers_scaled:
        linears = [name for pattern in plan.scaled for name in match_names(pattern, names)]
        sharing = data.mesh.get_group(data.mesh.ndim - 1), mesh[TP].get_group()
        casts = gather_cast(module, linears, sharing, getattr(torch, plan.precision.compute))
    num_frozen = len([*takewhile(lambda members: _has_no_backward(module, members), in_order)])
    _prefetch_backward(units[num_frozen:], {module.get_submodule(name) for name in of_experts})
    return GradientSync(
        units=tuple(units),
        each_backward=plan.zero > 1,
        keep_gathered=plan.zero < 3,
        is_replicated=mesh[DP_REPLICATE].size() > 1,
        reductions=tuple(reductions),
        summed=tuple(module.get_submodule(name) for pattern in plan.summed for name in match_names(pattern, names)),
        casts=casts,
    )


def _find_offload(plan: Plan, device_type: str) -> OffloadPolicy:
    """Policy of FSDP2 for the state: beside a GPU in pinned memory, if not in a file, so that no copy makes it wait."""
    if not plan.offloads_state:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device_type == "cuda" and not plan.has_state_on_disk)


def _make_reduction(group: dist.ProcessGroup | None) -> DefaultReduceScatter:
    return DefaultReduceScatter() if group is None else _ReduceScatter(group)


def share_context(syncs: Sequence[GradientSync]) -> None:
    """Let the stages of a rank share FSDP2's streams, and the buffer that it keeps of the last reduction.

    Each would keep its own, as large as a unit in the reduce format, from one microbatch's backward to the next. Call
    it before the first forward, with what `apply_plan` gave for every stage of the rank.
    """
    share_comm_ctx([sync.units[-1] for sync in syncs])


def _prefetch_backward(units: Sequence[FSDPModule], experts: Collection[nn.Module]) -> None:
    """While a unit computes its backward, gather the one before it; `units` in the order of the forward, root last.

    `units` are those that have a backward. Experts are part of the block before them in that order, and gathered with
    it: backward comes to them when it has hardly begun with the block.

    FSDP2's own guess takes the order of all forwards of the step for one chain, so that the first unit of a
    microbatch gathers the last unit of another one for nothing. The first unit names itself, which is a way to say
    none.
    """
    before: list[FSDPModule] = []
    for unit in units:
        if unit in experts:
            unit.set_modules_to_backward_prefetch([unit])
            before.append(unit)
        else:
            unit.set_modules_to_backward_prefetch(before or [unit])
            before = [unit]


def _has_no_backward(module: nn.Module, members: list[str]) -> bool:
    """Whether gradients end before a unit if none precedes it: in the first stage where nothing of it is trained."""
    trains = any(p.requires_grad for name in members for p in module.get_submodule(name).parameters())
    return not trains and any(name == EMBEDDING for name, _ in module.named_modules())


def _as_unit(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule), "fully_shard changes the class of what it shards"
    return module


def _members(unit: tuple[str, ...], names: list[str]) -> list[list[str]]:
    """The module groups that a unit means here: a single pattern has one for each match, several have one together."""
    if len(unit) == 1:
        return [[name] for name in match_names(unit[0], names)]
    together = [name for pattern in unit for name in match_names(pattern, names)]
    return [together] if together else []
