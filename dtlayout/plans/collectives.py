"""Collectives over tp on plain tensors, each with the one that its gradient needs.

| function | forward | backward |
|---|---|---|
| `replicate` | | all-reduce |
| `all_reduce` | all-reduce | |
| `all_gather` | all-gather | reduce-scatter |
| `reduce_scatter` | reduce-scatter | all-gather |
| `all_gather_cast` | all-gather in fp8 | reduce-scatter |
| `reduce_scatter_cast` | reduce-scatter | all-gather in fp8 |

The first two are f and g of arXiv:1909.08053, sec. 3; the others theirs under sequence parallelism, g and ḡ of
arXiv:2205.05198, sec. 4.2.2. They are torch's functional operators, which torch.compile traces and selective
recomputation knows by name, waited for at once: a tensor that still waits dispatches each operator through Python.

[Note: numbers that are cast twice]
What was gathered in fp8 is given to matmuls in the compute format, and they cast it again. They find the same bits as
if it had been gathered in the compute format. The largest number goes through fp8 unharmed, so the scale is the same.
Others come back within 2^-9 of what fp8 holds, which is much nearer to it than to its neighbours. Whatever reads a
gathered tensor beside such matmuls would see rounded numbers: `plan.gathers_cast` asks that nothing does.

Legend: B batch, S sequence, t ranks, s = S / t, D model width.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtlayout.ops.scaled import E4M3, E5M2, cast, find_magnitude, find_scales

_operators = torch.ops._c10d_functional


class Group(NamedTuple):
    """The ranks of tp or of cp, in values that are equal in every block, so that torch.compile reuses code."""

    name: str
    size: int
    rank: int
    """Index of this rank among them."""
    shares_memory: bool = False
    """Whether the GPUs of its ranks read each other's memory, [Note: two ways to send pieces]."""

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Group":
        """The group of a mesh with one axis."""
        ranks = dist.get_process_group_ranks(mesh.get_group())
        shares_memory = mesh.device_type == "cuda" and _are_peers(ranks)
        return cls(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank(), shares_memory)


def _are_peers(ranks: Sequence[int]) -> bool:
    """Whether the GPUs of these ranks are in one node and read each other's memory."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if len({rank // per_node for rank in ranks}) > 1 or torch.cuda.device_count() < per_node:
        return False
    gpus = [rank % per_node for rank in ranks]
    return all(torch.cuda.can_device_access_peer(one, other) for one, other in permutations(gpus, 2))


def replicate(x: Tensor, group: Group) -> Tensor:
    """The tensor itself, which every rank has whole; each rank's gradient of it is one term of a sum."""
    return Moved.apply(x, group, _same, _all_reduce)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum of the ranks' terms, whole on every rank."""
    return Moved.apply(x, group, _all_reduce, _same)


def all_gather(x_BsD: Tensor, group: Group) -> Tensor:
    """The whole sequence [B, S, D] on every rank, from each rank's part; each rank's gradient is one term of a sum."""
    return Moved.apply(x_BsD, group, _all_gather, _reduce_scatter)


def reduce_scatter(x_BSD: Tensor, group: Group) -> Tensor:
    """This rank's part [B, s, D] of the sum of the ranks' terms."""
    return Moved.apply(x_BSD, group, _reduce_scatter, _all_gather)


def all_gather_cast(x_BsD: Tensor, group: Group) -> Tensor:
    """`all_gather` in e4m3, for matmuls in fp8 with one scale for a tensor, [Note: numbers that are cast twice]."""
    return Moved.apply(x_BsD, group, partial(_all_gather_cast, fmt=E4M3), _reduce_scatter)


def reduce_scatter_cast(x_BSD: Tensor, group: Group) -> Tensor:
    """`reduce_scatter` for such matmuls: the gradient is gathered in e5m2."""
    return Moved.apply(x_BSD, group, _reduce_scatter, partial(_all_gather_cast, fmt=E5M2))


Move = Callable[[Tensor, Group], Tensor]
"""(this rank's tensor, group) → its tensor after a collective."""


class Moved(torch.autograd.Function):
    """Applies the collective `ahead`; `back` is the collective for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, ahead: Move, back: Move) -> Tensor:
        ctx.group, ctx.back = group, back
        return ahead(x, group)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradient[0], ctx.group), None, None, None


def _same(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    return wait(_operators.all_reduce(x.contiguous(), "sum", group.name))


def _all_gather(x_BsD: Tensor, group: Group) -> Tensor:
    """Rank after rank, and then in the order of tokens: that is a copy, unless there is one sequence only."""
    return wait(begin_gather(x_BsD, group)).view(group.size, *x_BsD.shape).transpose(0, 1).flatten(1, 2)


def _all_gather_cast(x_BsD: Tensor, group: Group, fmt: torch.dtype) -> Tensor:
    """The whole sequence as `_all_gather` gives it, from a byte for each number."""
    scale = find_scales(find_largest(find_magnitude(x_BsD), group), fmt)
    bytes_BSD = _all_gather(cast(x_BsD, scale, fmt).values.view(torch.uint8), group)
    return (
        bytes_BSD.view(fmt).to(x_BsD.dtype).div_(scale.view(1))
    )  # not a scalar, which would be rounded to that format


def _reduce_scatter(x_BSD: Tensor, group: Group) -> Tensor:
    """The order of ranks comes first: that is a copy, unless there is one sequence only."""
    by_rank = x_BSD.unflatten(1, (group.size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    return wait(begin_scatter(by_rank, group))


def find_largest(x: Tensor, group: Group) -> Tensor:
    """Elementwise the largest number of the ranks' tensors, on every rank; it has no gradient."""
    return wait(_operators.all_reduce(x, "max", group.name))


def begin_gather(x: Tensor, group: Group) -> Tensor:
    """Each rank's tensor [B, …], one after the other [t·B, …]; call `wait` before it is read."""
    return _operators.all_gather_into_tensor(x.contiguous(), group.size, group.name)


def begin_scatter(x: Tensor, group: Group) -> Tensor:
    """This rank's part [B, …] of the sum of the ranks' tensors [t·B, …]; call `wait` before it is read."""
    return _operators.reduce_scatter_tensor(x, "sum", group.size, group.name)


def begin_exchange(x: Tensor, group: Group, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> Tensor:
    """Rows that come from each rank, one after the other, for rows that go to each; call `wait` before it is read."""
    return _operators.all_to_all_single(x.contiguous(), [*from_ranks], [*to_ranks], group.name)


def exchange(x: Tensor, group: Group, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> Tensor:
    """`begin_exchange`, waited for at once; backward sends the gradient's rows back."""
    return Moved.apply(
        x,
        group,
        partial(_exchange, to_ranks=to_ranks, from_ranks=from_ranks),
        partial(_exchange, to_ranks=from_ranks, from_ranks=to_ranks),
    )


def _exchange(x: Tensor, group: Group, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> Tensor:
    return wait(begin_exchange(x, group, to_ranks, from_ranks))


def wait(x: Tensor) -> Tensor:
    """The result of a collective that was begun, once it is there."""
    return _operators.wait_tensor(x)


def name_operator(operator: Any, args: Sequence[Any]) -> str:
    """Name of an operator that was called with `args`; of an all-to-all with the name of its group."""
    return name_all_to_all(args[-1]) if operator is _operators.all_to_all_single.default else str(operator)


def name_all_to_all(group: str) -> str:
    """Name of the all-to-alls of a group, by which they are told from those of other groups."""
    return f"{_operators.all_to_all_single.default} of {group}"
