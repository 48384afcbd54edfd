"""Communicators of a job, opened before its first step.

NCCL opens a group's communicator in its first collective, and one for two ranks in their first message. Within a step
that takes seconds, in an order that depends on who comes first, and a rank that cannot reach another hangs somewhere in
a forward. Here all ranks open all of them, axis after axis.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtlayout.mesh.axes import PP


def open_communicators(mesh: DeviceMesh, others: Iterable[dist.ProcessGroup | None]) -> list[str]:
    """Send a number through the job, each axis of the mesh and `others`, then between neighbours of the pipeline.

    Call it on all ranks together; None stands for a group that a rank has not. The result names what was opened.
    """
    number, opened = torch.zeros(1, device=mesh.device_type), list[str]()
    names = mesh.mesh_dim_names or ()
    groups = [("job", dist.group.WORLD), *zip(names, mesh.get_all_groups(), strict=True)]
    groups += [(f"group {i}", group) for i, group in enumerate(others)]
    seen = set[str]()
    for name, group in groups:
        if group is None or group.size() == 1 or group.group_name in seen:
            continue
        seen.add(group.group_name)
        dist.all_reduce(number, group=group)
        opened.append(name)
    for peer, sends in _list_neighbours(mesh[PP].get_local_rank(), mesh[PP].size()):
        pass_on = dist.isend if sends else dist.irecv
        work = pass_on(number, group=mesh[PP].get_group(), **{"group_dst" if sends else "group_src": peer})
        assert work is not None, "this rank is a member of its own pipeline group"
        work.wait()
        opened.append(f"pp {peer}")
    return opened


def _list_neighbours(rank: int, size: int) -> Iterator[tuple[int, bool]]:
    """(another rank, whether this one sends) for the neighbours of a pipeline rank, the last one's being the first.

    Pairs that begin at an even rank come first, so that nobody waits in a circle; the pair of both ends comes last.

    >>> [*_list_neighbours(0, 4)], [*_list_neighbours(1, 4)], [*_list_neighbours(3, 4)]
    ([(1, True), (3, False)], [(0, False), (2, True)], [(2, False), (0, True)])
    >>> [*_list_neighbours(1, 2)], [*_list_neighbours(0, 1)]
    ([(0, False)], [])
    """
    for parity in (0, 1):
        for begin in (rank, rank - 1):
            if begin % 2 == parity and 0 <= begin < size - 1:
                yield (rank + 1, True) if begin == rank else (rank - 1, False)
    if size > 2 and rank in (0, size - 1):
        yield (size - 1, False) if rank == 0 else (0, True)
