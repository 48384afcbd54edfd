"""ShardedMuon: the momentum of sharded matrices, each made orthogonal by the rank to which it is sent whole.

The momentum of a matrix lies in tiles on a team of ranks: those of dp_shard and cp, and of tp where that splits the
matrix; for a stack of experts only the ranks that split its matrices. Elementwise work is done on tiles. Then matrices
go bucket by bucket (`spec.newton_schulz.plan_buckets`): an all-to-all sends each tile to its matrix's owner, which
iterates, and another one sends tiles of the update back. Copies of a team do the same work and get the same bits.

| format | where |
|---|---|
| of the parameter | gradient, momentum, update of the weight |
| bf16, or the parameter's where that is wider than fp32 | what is sent, and the iteration |

A rank holds beside its state, for a bucket in which it has T elements of tiles and owns W elements of matrices: T + W
while they are sent, and W + k·(2·m·n + m²) while k of them, m by n, are iterated.

[Note: a step that is left out]
`found_inf` is a flag on the device, as in torch's fused optimizers, and the host does not wait for it. Where it is set
the momentum is multiplied by 1 and the weight too, and numbers are added that change no bit of anything: -0.0.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, product
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtlayout.mesh.build import open_joint_group
from dtlayout.mesh.parts import local_part
from dtlayout.plans.collectives import Group, begin_exchange, wait
from dtlayout.spec.newton_schulz import COEFFICIENTS, SCALES, Bucket, Sides, plan_buckets

Region = tuple[slice, slice]
"""Rows and columns of a matrix."""


class Matrix(NamedTuple):
    """A weight, or one of a stack, of which each rank of a team has a tile."""

    parameter: nn.Parameter
    place: int | None
    """Index in this rank's part of the stack; None for a parameter that is one matrix."""
    settings: dict[str, Any]
    """Learning rate and weight decay: the parameter's group."""
    shape: Sides
    """Rows and columns of the whole matrix."""
    tiles: tuple[Region, ...]
    """Tile of each rank of the team."""

    def numel(self, rank: int) -> int:
        """Elements of a rank's tile."""
        return prod(part.stop - part.start for part in self.tiles[rank])

    def take(self, part: Tensor) -> Tensor:
        """The matrix's tile, of this rank's part of the parameter or of a tensor like that."""
        return part if self.place is None else part[self.place]


class Team(NamedTuple):
    """Ranks that share matrices, and the order in which they iterate these."""

    group: Group | None
    """The ranks; None where one rank has whole matrices."""
    matrices: list[Matrix]
    buckets: list[Bucket]

    @property
    def rank(self) -> int:
        """Index of this rank in the team."""
        return self.group.rank if self.group else 0


class ShardedMuon(torch.optim.Optimizer):
    """Muon over parameters of two dimensions, or of three where they are stacks of matrices, sharded or whole.

    All ranks that share parameters build it together and step together, with the same parameters in the same order. A
    parameter without a gradient counts as one whose gradient is zero. A step uses the gradients up: they are changed.
    """

    def __init__(
        self, params: Any, lr: float, *, momentum: float, nesterov: bool, steps: int, eps: float, adjust: str,
        weight_decay: float = 0.0,
    ):  # fmt: skip
        """`adjust` is a key of `SCALES`; the other keywords are those of `spec.optimizers.Muon`.

        ValueError if a parameter has neither two nor three dimensions.
        """
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.momentum, self.nesterov, self.scale = momentum, nesterov, SCALES[adjust]
        self.iterate = partial(orthogonalize, steps=steps, eps=eps)
        self._step_supports_amp_scaling = True
        self._teams = _make_teams(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters, or none where `found_inf` says so: [Note: a step that is left out].

        Gradients are divided by `grad_scale`, if there is one.
        """
        found_inf = getattr(self, "found_inf", None)
        is_left_out = None if found_inf is None else found_inf.reshape(()) > 0
        directions = dict[nn.Parameter, Tensor]()
        for group in self.param_groups:
            if group["params"]:
                directions |= self._move_momentum(group["params"], is_left_out)
                weights = [local_part(parameter) for parameter in group["params"]]
                torch._foreach_mul_(weights, _keep(1 - group["lr"] * group["weight_decay"], weights[0], is_left_out))
        for team in self._teams:
            for bucket in team.buckets:
                self._update_bucket(team, bucket, directions, is_left_out)

    def _move_momentum(
        self, parameters: Sequence[nn.Parameter], is_left_out: Tensor | None
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter, and its gradient in the momentum: the momentum itself, or a look ahead of it."""
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        kept = [local_part(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        pairs = zip(parameters, kept, strict=True)
        gradients = [torch.zeros_like(buffer) if p.grad is None else local_part(p.grad) for p, buffer in pairs]
        if (divisor := getattr(self, "grad_scale", None)) is not None:
            torch._foreach_div_(gradients, divisor)
        if is_left_out is not None:
            for gradient in gradients:
                gradient.masked_fill_(is_left_out, -0.0)
        torch._foreach_mul_(kept, _keep(self.momentum, kept[0], is_left_out))
        torch._foreach_add_(kept, gradients)
        if self.nesterov:
            torch._foreach_add_(gradients, kept, alpha=self.momentum)
        return zip(parameters, gradients if self.nesterov else kept, strict=True)

    def _update_bucket(
        self, team: Team, bucket: Bucket, directions: dict[nn.Parameter, Tensor], is_left_out: Tensor | None
    ) -> None:
        """Send directions to the owners of their matrices, have these iterate, and add what comes back to weights."""
        order = [team.matrices[place] for owned in bucket.owned for place in owned]
        own = [team.matrices[place] for place in bucket.owned[team.rank]]
        sizes = [matrix.numel(team.rank) for matrix in order]
        to_ranks = [sum(team.matrices[place].numel(team.rank) for place in owned) for owned in bucket.owned]
        from_ranks = [sum(matrix.numel(rank) for matrix in own) for rank in range(len(bucket.owned))]
        tiles = _pack([matrix.take(directions[matrix.parameter]) for matrix in order])
        if team.group:
            tiles = wait(begin_exchange(tiles, team.group, to_ranks, from_ranks))
        by_rank = [
            part.split([matrix.numel(rank) for matrix in own]) for rank, part in enumerate(tiles.split(from_ranks))
        ]
        numbered = [(matrix, [parts[i] for parts in by_rank]) for i, matrix in enumerate(own)]
        for _, alike in groupby(numbered, lambda each: sorted(each[0].shape)):
            self._iterate_tiles(list(alike))
        del by_rank, numbered
        if team.group:
            tiles = wait(begin_exchange(tiles, team.group, from_ranks, to_ranks))
        if is_left_out is not None:
            tiles.masked_fill_(is_left_out, 0.0)  # of which a negative multiple is added
        for matrix, tile in zip(order, tiles.split(sizes), strict=True):
            rate = matrix.settings["lr"] * self.scale(*matrix.shape)
            weight = matrix.take(local_part(matrix.parameter))
            weight.add_(tile.view(weight.shape), alpha=-rate)

    def _iterate_tiles(self, alike: list[tuple[Matrix, list[Tensor]]]) -> None:
        """Replace the tiles of whole matrices of one size, of each with those of all ranks, by those of the update."""
        m, n = sorted(alike[0][0].shape)
        places = [
            (number, matrix.shape != (m, n), where, tile)
            for number, (matrix, tiles) in enumerate(alike)
            for where, tile in zip(matrix.tiles, tiles, strict=True)
        ]

        def copy(whole_kmn: Tensor, *, goes_in: bool) -> None:
            for number, is_tall, where, tile in places:
                part = (whole_kmn[number].mT if is_tall else whole_kmn[number])[where]
                ends = (part, tile.view(part.shape)) if goes_in else (tile.view(part.shape), part)
                ends[0].copy_(ends[1])

        batch = [places[0][3].new_empty(len(alike), m, n)]
        copy(batch[0], goes_in=True)
        copy(self.iterate(batch), goes_in=False)


def orthogonalize(batch: list[Tensor], *, steps: int, eps: float) -> Tensor:
    """Matrices [k, m, n] with the singular vectors of those in a list of one tensor, and singular values near 1.

    The tensor is taken out of the list and used up, so that no more than two of its size and two [k, m, m] are held.
    """
    a, b, c = COEFFICIENTS
    x = batch.pop()
    x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_(min=eps))
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        del gram
        x = torch.baddbmm(x, polynomial, x, beta=a)
        del polynomial
    return x


def _pack(tiles: Sequence[Tensor]) -> Tensor:
    """Tiles one after the other, in the format in which they are sent and iterated."""
    first = tiles[0]
    is_wide = first.dtype.itemsize > torch.float32.itemsize
    packed = first.new_empty(sum(tile.numel() for tile in tiles), dtype=first.dtype if is_wide else torch.bfloat16)
    for part, tile in zip(packed.split([tile.numel() for tile in tiles]), tiles, strict=True):
        part.view(tile.shape).copy_(tile)
    return packed


def _keep(factor: float, like: Tensor, is_left_out: Tensor | None) -> Tensor:
    """`factor` as a tensor of no dimensions, or 1 in a step that is left out."""
    kept = torch.full((), factor, dtype=like.dtype, device=like.device)
    return kept if is_left_out is None else kept.masked_fill_(is_left_out, 1.0)


@torch.no_grad()
def _make_teams(param_groups: Sequence[dict[str, Any]]) -> list[Team]:
    """The teams of some parameters, in the order of these, with their matrices."""
    groups = dict[tuple[int, ...], Group | None]()
    matrices = defaultdict[tuple[int, ...], list[Matrix]](list)
    for settings in param_groups:
        for parameter in settings["params"]:
            if parameter.dim() not in (2, 3):
                raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is no matrix and no stack of matrices")
            axes, tiles = _find_tiles(parameter)
            ranks, group = tuple[int, ...](), None
            if axes:
                joint = open_joint_group(parameter.device_mesh, axes)
                ranks = tuple(dist.get_process_group_ranks(joint))
                group = Group(joint.group_name, joint.size(), joint.rank())
            groups.setdefault(ranks, group)
            shape = parameter.shape[-2], parameter.shape[-1]
            places = [None] if parameter.dim() == 2 else range(local_part(parameter).shape[0])
            matrices[ranks] += [Matrix(parameter, place, settings, shape, tiles) for place in places]
    return [
        Team(group, matrices[ranks], plan_buckets([each.shape for each in matrices[ranks]], max(1, len(ranks))))
        for ranks, group in groups.items()
    ]


def _find_tiles(parameter: Tensor) -> tuple[list[int], tuple[Region, ...]]:
    """The axes of a parameter's mesh that split its matrices, and the tile of each rank along them.

    An inner axis splits before an outer one, as tp and ep before FSDP2, into parts of equal length but the last ones.
    """
    if not isinstance(parameter, DTensor):
        return [], ((slice(0, parameter.shape[-2]), slice(0, parameter.shape[-1])),)
    mesh, own, first = parameter.device_mesh, parameter.device_mesh.get_coordinate(), parameter.dim() - 2
    assert own is not None, "this rank is in the mesh of its parameters"
    splits = [
        (axis, int(placement.dim))  # type: ignore[attr-defined]
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    ]
    axes = [axis for axis, dim in splits if dim >= first]

    def find(coordinate: Sequence[int]) -> Region:
        starts, sizes = [0] * parameter.dim(), list(parameter.shape)
        for axis, dim in reversed(splits):
            length = -(-sizes[dim] // mesh.size(axis))
            offset = min(sizes[dim], length * coordinate[axis])
            starts[dim] += offset
            sizes[dim] = min(length, sizes[dim] - offset)
        rows, columns = (slice(starts[dim], starts[dim] + sizes[dim]) for dim in (first, first + 1))
        return rows, columns

    def along(places: Sequence[int]) -> list[int]:
        at = dict(zip(axes, places, strict=True))
        return [at.get(axis, own[axis]) for axis in range(mesh.ndim)]

    own_size = tuple(part.stop - part.start for part in find(own))
    assert own_size == tuple(local_part(parameter).shape[-2:]), "the parameter is split as its placements say"
    return axes, tuple(find(along(places)) for places in product(*(range(mesh.size(axis)) for axis in axes)))
