"""Equal parts: what several ranks, or two stages, hold of one tensor must be the same bits after a load.

A part is a block of a tensor, told by the tensor's name, the block's first indices and its shape. Copies of one are
there along dims of the mesh that shard nothing, and of tied embeddings on both ends of a pipeline. A part's digest

    sum_i mix(bits_i + (i + 1) · step)     modulo 2^64

tells two of them apart whatever their numbers are, NaN included, unless they were made to agree. Only digests are sent.
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtlayout.base.errors import CheckpointError
from dtlayout.base.formatting import plural
from dtlayout.plans.init import CHUNK, find_place

_LISTED = 5
"""Tensors that are named; the others are counted."""
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
"""Factors of splitmix64, as signed numbers."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TensorPart = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name, first indices, shape."""


def check_equal_parts(
    named: Iterable[tuple[str, Tensor]], tied: Collection[str], source: Path, group: dist.ProcessGroup | None
) -> None:
    """Compare all copies of each part after a load; CheckpointError on every rank if some copies differ.

    The error names the first 5 such tensors and counts the others. All ranks of `group` call this together; None is the
    default group. Without torch.distributed only the copies that this process holds are compared.

    `named` gives each tensor of this rank with its name, and a tied tensor once for each pipeline stage that holds it.
    `tied` has the names of the tied tensors. `source` is the checkpoint or folder that was loaded.
    """
    digests = [(part, digest) for name, tensor in named for part, digest in _digest(name, tensor, name in tied)]
    differing: list[list[str]] = [[]]
    if not dist.is_initialized():  # generating text, on one process
        differing[0] = _find_differing(digests)
    else:
        is_first = dist.get_rank(group) == 0
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.gather_object(digests, gathered if is_first else None, group=group, group_dst=0)
        differing[0] = _find_differing(each for of_rank in gathered for each in of_rank) if is_first else []
        dist.broadcast_object_list(differing, group=group, group_src=0)
    if names := differing[0]:
        others = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        raise CheckpointError(
            f"{source} is loaded, and copies of {plural(len(names), 'tensor')} that must be equal are not: "
            f"{', '.join(names[:_LISTED])}{others}; see whether all ranks read the same files, and start again"
        )


def _digest(name: str, tensor: Tensor, is_tied: bool) -> list[tuple[TensorPart, int]]:
    """This rank's part and its digest; none where nobody else holds it."""
    local, first = find_place(tensor)
    if local.numel() == 0 or not (is_tied or _has_copies(tensor)):
        return []
    return [((name, first, tuple(local.shape)), digest(local))]


def _has_copies(tensor: Tensor) -> bool:
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    return any(place.is_replicate() and mesh.size(dim) > 1 for dim, place in enumerate(tensor.placements))


@torch.no_grad()
def digest(tensor: Tensor) -> int:
    """A number that depends on every bit of a tensor and on where in it they are, as the head of this file says."""
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        places = torch.arange(start + 1, start + part.numel() + 1, device=tensor.device)
        total += _mix(part + places * _STEP).sum()
    return int(total)


def _mix(values: Tensor) -> Tensor:
    """Spread each 64-bit value over all bits, no two to one: the end of splitmix64 (doi:10.1145/2714064.2660195).

    Without it the highest bits of a weighted sum would be lost, in which floating-point numbers differ.
    """
    for shift, factor in ((30, _FACTORS[0]), (27, _FACTORS[1]), (31, 1)):
        values = (values ^ ((values >> shift) & ((1 << (64 - shift)) - 1))) * factor  # the sign is a bit like others
    return values


def _find_differing(digests: Iterable[tuple[TensorPart, int]]) -> list[str]:
    found: dict[TensorPart, int] = {}
    return list(dict.fromkeys(part[0] for part, digest in digests if found.setdefault(part, digest) != digest))
