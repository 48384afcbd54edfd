"""Tied embeddings, of which the first and the last stage hold a copy each: the first one embeds, the last one projects.

Both copies start equal and get the same gradient, the sum of both uses, so the same update keeps them equal.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtlayout.mesh.axes import PP
from dtlayout.mesh.parts import local_part
from dtlayout.schedules.placement import Placement


def sum_tied_gradients(
    modules: Sequence[nn.Module], aliases: Mapping[str, str], mesh: DeviceMesh, placement: Placement
) -> None:
    """Exchange the gradients of tied weights between the ranks of the first and the last stage and add them up.

    `aliases` is `ModelShape.aliases`. Both copies are sharded alike, so shards meet their counterparts.
    """
    group, device = mesh[PP].get_group(), mesh.device_type
    rank, ends = group.rank(), (placement.rank_of(0), placement.rank_of(placement.num_stages - 1))
    if placement.num_stages == 1 or rank not in ends:
        return
    peer = ends[rank == ends[0]]
    for second, first in aliases.items():
        name = first if rank == ends[0] else second
        if not _find_parameter(modules, name).requires_grad:  # a frozen weight is frozen on both ends
            continue
        gradient = _local_gradient(modules, name)
        if peer == rank:  # both ends are here
            _local_gradient(modules, second).copy_(gradient.add_(_local_gradient(modules, second)))
            continue
        sent = gradient.to(device)  # offload may keep the gradient on the host, from which the group cannot send
        other = torch.empty_like(sent)
        # Not as one batch: NCCL would open the communicator of the whole group for it, and wait for ranks that don't
        # come.
        exchange: list[Callable[[], Any]] = [
            partial(dist.send, sent, group=group, group_dst=peer),
            partial(dist.recv, other, group=group, group_src=peer),
        ]
        for message in exchange if rank == ends[0] else reversed(exchange):
            message()
        gradient += other.to(gradient.device)


def _find_parameter(modules: Sequence[nn.Module], name: str) -> nn.Parameter:
    found = [p for module in modules for n, p in module.named_parameters() if n == name]
    assert len(found) == 1, f"one stage of this rank holds {name}"
    return found[0]


def _local_gradient(modules: Sequence[nn.Module], name: str) -> torch.Tensor:
    gradient = _find_parameter(modules, name).grad
    assert gradient is not None, "both ends of the model are used in every microbatch"
    return local_part(gradient)
