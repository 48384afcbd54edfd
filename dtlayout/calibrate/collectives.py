"""Measures of several ranks: each collective by size, number of ranks and distance, all groups at the same time."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from dtlayout.calibrate.clock import time_together
from dtlayout.calibrate.measured import CollectiveTime
from dtlayout.model_shape import divisors

_SIZES = {"cpu": (2**12, 2**16, 2**20, 2**22), "cuda": (2**16, 2**20, 2**24, 2**28)}
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def measure_collectives(device_type: str, ranks_per_node: int) -> Iterator[CollectiveTime]:
    """Time collectives of groups that lie together, as tp's, and of groups that lie apart, as data parallelism's."""
    world = dist.get_world_size()
    for num_ranks in divisors(world)[1:]:
        for stride in dict.fromkeys((1, world // num_ranks)):
            blocks = torch.arange(world).view(-1, num_ranks, stride)
            everyones = blocks.transpose(1, 2).reshape(-1, num_ranks).tolist()
            group, _ = dist.new_subgroups_by_enumeration(everyones)
            crosses = any(len({rank // ranks_per_node for rank in ranks}) > 1 for ranks in everyones)
            for size in _SIZES[device_type]:
                for kind, action in _prepare(size, group, device_type).items():
                    yield CollectiveTime(
                        kind=kind, num_ranks=num_ranks, stride=stride, size_bytes=size, crosses_nodes=crosses,
                        seconds=time_together(action, device_type),
                    )  # fmt: skip
            dist.destroy_process_group(group)


def _prepare(size: int, group: dist.ProcessGroup, device_type: str) -> dict[str, Callable[[], object]]:
    """Each kind of collective of so many bytes; of messages every second rank sends to the next one, and that back."""
    ranks, place = dist.get_process_group_ranks(group), dist.get_rank(group)
    part = torch.zeros(max(1, size // 4 // len(ranks)), device=device_type)
    whole = torch.zeros(part.numel() * len(ranks), device=device_type)
    both = (dist.send, dist.recv) if place % 2 == 0 else (dist.recv, dist.send)
    messages = [partial(act, whole, ranks[place ^ 1], group=group) for act in both if place ^ 1 < len(ranks)]
    return {
        "all-reduce": partial(dist.all_reduce, whole, group=group),
        "all-gather": partial(_GATHER, whole, part, group=group),
        "reduce-scatter": partial(_SCATTER, part, whole, group=group),
        "message": lambda: [send_or_receive() for send_or_receive in messages],
    }
