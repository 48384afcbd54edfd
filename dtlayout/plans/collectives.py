"""Collectives over tp on plain tensors, each with the one that its gradient needs.

| function | forward | backward |
|---|---|---|
| `replicate` | | all-reduce |
| `all_reduce` | all-reduce | |
| `all_gather` | all-gather | reduce-scatter |
| `reduce_scatter` | reduce-scatter | all-gather |

The first two are f and g of arXiv:1909.08053, sec. 3; the others theirs under sequence parallelism, g and ḡ of
arXiv:2205.05198, sec. 4.2.2. They are torch's functional operators, which torch.compile traces and selective
recomputation knows by name, waited for at once: a tensor that still waits dispatches each operator through Python.

Legend: B batch, S sequence, t ranks, s = S / t, D model width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_operators = torch.ops._c10d_functional


class Group(NamedTuple):
    """The ranks of tp, as what torch.compile takes for the same in every block."""

    name: str
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Group":
        """That of a mesh with one axis."""
        return cls(mesh.get_group().group_name, mesh.size())


def replicate(x: Tensor, group: Group) -> Tensor:
    """A tensor that is whole on every rank, each of which then knows one term of its gradient."""
    return _Edge.apply(x, group, _same, _all_reduce)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' terms, whole on every rank."""
    return _Edge.apply(x, group, _all_reduce, _same)


def all_gather(x_BsD: Tensor, group: Group) -> Tensor:
    """The whole sequence [B, S, D] from each rank's part, on every rank, each of which knows a term of its gradient."""
    return _Edge.apply(x_BsD, group, _all_gather, _reduce_scatter)


def reduce_scatter(x_BSD: Tensor, group: Group) -> Tensor:
    """This rank's part [B, s, D] of the sum of the ranks' terms."""
    return _Edge.apply(x_BSD, group, _reduce_scatter, _all_gather)


_Collective = Callable[[Tensor, Group], Tensor]


class _Edge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, ahead: _Collective, back: _Collective) -> Tensor:
        ctx.group, ctx.back = group, back
        return ahead(x, group)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradient[0], ctx.group), None, None, None


def _same(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    return _operators.wait_tensor(_operators.all_reduce(x.contiguous(), "sum", group.name))


def _all_gather(x_BsD: Tensor, group: Group) -> Tensor:
    """Rank after rank, and then in the order of tokens: a copy, but not of one sequence."""
    gathered = _operators.all_gather_into_tensor(x_BsD.contiguous(), group.size, group.name)
    return _operators.wait_tensor(gathered).view(group.size, *x_BsD.shape).transpose(0, 1).flatten(1, 2)


def _reduce_scatter(x_BSD: Tensor, group: Group) -> Tensor:
    """In the order of ranks first: a copy, but not of one sequence."""
    by_rank = x_BSD.unflatten(1, (group.size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    return _operators.wait_tensor(_operators.reduce_scatter_tensor(by_rank, "sum", group.size, group.name))
