"""The norm of all gradients of a model that is spread over every axis, and clipping by it."""

from collections import defaultdict
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtlayout.mesh.axes import PP
from dtlayout.mesh.parts import local_part


def local_squared_norm(parameters: Sequence[nn.Parameter], mesh: DeviceMesh) -> Tensor:
    """This rank's part of the squared gradient norm, fp64: summed over all ranks it is the squared norm.

    A shard that lies on k ranks (a norm's weight on every tp rank, every shard on dp_replicate of them) counts 1/k on
    each. So one all-reduce of one number serves all axes, whatever mesh each parameter lives on.
    """
    stage_ranks = mesh.size() // mesh[PP].size()
    by_copies: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            by_copies[stage_ranks // _count_shards(parameter.grad)].append(local_part(parameter.grad))
    total = torch.zeros((), dtype=torch.float64, device=mesh.device_type)
    for copies, gradients in by_copies.items():
        total += torch.nn.utils.get_total_norm(gradients).to(torch.float64).square() / copies
    return total


def find_divisor(norm: Tensor, max_norm: float, loss_scale: float = 1.0) -> Tensor:
    """The number by which all gradients are divided: their `loss_scale`, and what brings their global `norm`, that of
    the divided ones, down to `max_norm`."""
    return ((norm + 1e-6) / max_norm).clamp(min=1.0) * loss_scale


def clip_gradients(parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float, loss_scale: float = 1.0) -> None:
    """Divide all gradients by the `loss_scale` that they have, and scale them so that their global `norm` is at most
    `max_norm`; `norm` is that of the divided ones."""
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        scale = find_divisor(norm, max_norm, loss_scale).reciprocal()
        torch._foreach_mul_(gradients, scale.to(gradients[0]))  # which may lie on the host


def _count_shards(gradient: Tensor) -> int:
    """Into how many different pieces a gradient is split, over all ranks of its stage."""
    if not isinstance(gradient, DTensor):
        return 1
    mesh, placements = gradient.device_mesh, enumerate(gradient.placements)
    return prod(mesh.size(axis) for axis, placement in placements if not placement.is_replicate())
