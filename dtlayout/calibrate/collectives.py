"""Measures of several ranks: each collective by size, number of ranks and distance, all groups at the same time."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from dtlayout.calibrate.clock import time_together
from dtlayout.calibrate.measured import CollectiveTime
from dtlayout.model_shape import divisors

_SIZES = {"cpu": (2**12, 2**16, 2**20, 2**22), "cuda": (2**16, 2**20, 2**24, 2**28)}
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def measure_collectives(device_type: str, ranks_per_node: int) -> Iterator[CollectiveTime]:
    """Time collectives of groups that lie together, as tp's, and of groups that lie apart, as data parallelism's."""
    world, me = dist.get_world_size(), dist.get_rank()
    for num_ranks in divisors(world)[1:]:
        for stride in dict.fromkeys((1, world // num_ranks)):
            block = num_ranks * stride
            everyones = [
                [first + offset + i * stride for i in range(num_ranks)]
                for first in range(0, world, block)
                for offset in range(stride)
            ]
            groups = [dist.new_group(ranks) for ranks in everyones]
            mine = next(i for i, ranks in enumerate(everyones) if me in ranks)
            crosses = any(len({rank // ranks_per_node for rank in ranks}) > 1 for ranks in everyones)
            for kind, prepare in _KINDS.items():
                for size in _SIZES[device_type]:
                    action = prepare(size, num_ranks, groups[mine], device_type)
                    yield CollectiveTime(
                        kind=kind, num_ranks=num_ranks, stride=stride, size_bytes=size, crosses_nodes=crosses,
                        seconds=time_together(action, device_type),
                    )  # fmt: skip
            dist.destroy_process_group(groups[mine])


_Prepare = Callable[[int, int, dist.ProcessGroup, str], Callable[[], object]]


def _all_reduce(size: int, num_ranks: int, group: dist.ProcessGroup, device_type: str) -> Callable[[], object]:
    tensor = torch.zeros(size // 4, device=device_type)
    return lambda: dist.all_reduce(tensor, group=group)


def _all_gather(size: int, num_ranks: int, group: dist.ProcessGroup, device_type: str) -> Callable[[], object]:
    whole, part = _whole_and_part(size, num_ranks, device_type)
    return lambda: _GATHER(whole, part, group=group)


def _reduce_scatter(size: int, num_ranks: int, group: dist.ProcessGroup, device_type: str) -> Callable[[], object]:
    whole, part = _whole_and_part(size, num_ranks, device_type)
    return lambda: _SCATTER(part, whole, group=group)


def _message(size: int, num_ranks: int, group: dist.ProcessGroup, device_type: str) -> Callable[[], object]:
    """Every second rank sends to the next one, and that one back."""
    tensor, place = torch.zeros(size // 4, device=device_type), dist.get_rank(group)
    if place ^ 1 >= num_ranks:
        return lambda: None
    partner = dist.get_global_rank(group, place ^ 1)
    both: list[Callable[..., object]] = [dist.send, dist.recv] if place % 2 == 0 else [dist.recv, dist.send]

    def there_and_back() -> None:
        for act in both:
            act(tensor, partner, group=group)

    return there_and_back


def _whole_and_part(size: int, num_ranks: int, device_type: str) -> tuple[Tensor, Tensor]:
    part = torch.zeros(max(1, size // 4 // num_ranks), device=device_type)
    return torch.zeros(part.numel() * num_ranks, device=device_type), part


_KINDS: dict[str, _Prepare] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "message": _message,
}
