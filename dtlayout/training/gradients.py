"""The norm of all gradients of a model that is spread over every axis, and clipping by it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtlayout.mesh.axes import PP


def local_squared_norm(parameters: Sequence[nn.Parameter], mesh: DeviceMesh) -> Tensor:
    """This rank's share of the squared gradient norm, fp64: summed over all ranks it is the squared norm.

    A shard that lies on k ranks (a norm's weight on every tp rank, every shard on dp_replicate of them) counts 1/k on
    each. So one all-reduce of one number serves all axes, whatever mesh each parameter lives on.
    """
    total = torch.zeros((), dtype=torch.float64, device=mesh.device_type)
    stage_ranks = mesh.size() // mesh[PP].size()
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient, num_shards = parameter.grad, 1
        if isinstance(gradient, DTensor):
            for axis, placement in enumerate(gradient.placements):
                num_shards *= 1 if placement.is_replicate() else gradient.device_mesh.size(axis)
            gradient = gradient.to_local()
        total += torch.linalg.vector_norm(gradient, dtype=torch.float64).square() * (num_shards / stage_ranks)
    return total


def clip_gradients(parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients so that their global `norm` is at most `max_norm`."""
    gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
