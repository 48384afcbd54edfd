"""DeviceMesh of a layout, and the groups and views of it for the messages of a step."""

import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import (
    _get_default_group,
    _get_default_store,
    _get_default_timeout,
    _new_process_group_helper,
    _set_pg_timeout,
    _world,
)

from dtlayout.base.errors import InvalidLayout
from dtlayout.base.formatting import plural
from dtlayout.mesh.axes import (
    CP,
    DP_REPLICATE,
    DP_SHARD,
    EP,
    EXPERT_COPIES,
    EXPERT_SHARDS,
    TP,
    axis_sizes,
    expert_sizes,
)
from dtlayout.spec.layout import Layout

_meshes: WeakKeyDictionary[dist.Store, dict[tuple[object, ...], DeviceMesh]] = WeakKeyDictionary()
"""Store of the default process group → device type and degrees → mesh. A mesh holds the group itself, and would keep it
for ever if the group were the key. The store is freed when the group is destroyed, and the meshes with it."""


_reduction_groups: WeakKeyDictionary[dist.Store, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Store of the default process group → ranks → group of `open_reduction_group`; it lives as long as a mesh."""


_joint_groups: WeakKeyDictionary[dist.Store, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Store of the default process group → ranks → group of `open_joint_group`; it lives as long as a mesh."""


def build_mesh(layout: Layout, device_type: str, timeout_s: float = 0.0) -> DeviceMesh:
    """The mesh (pp, dp_replicate, dp_shard, cp, tp) over all ranks; axes of size 1 are there too.

    Slice it by name: `mesh["tp"]`. Initialises torch.distributed from the environment that torchrun sets, if nobody
    has. The same degrees get the same mesh as long as the default process group lives, since a mesh has groups of its
    own, which keep threads and open files. The groups end a collective that takes `timeout_s` seconds; 0 leaves them
    the limit of their backend. InvalidLayout if the product of the degrees is not the world size.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != layout.world_size:
        raise InvalidLayout(
            f"the layout {layout} needs {plural(layout.world_size, 'rank')}, this job has {world_size}; start it with "
            f"torchrun --nproc-per-node {layout.world_size}, or change the degrees"
        )
    if not dist.is_initialized():
        dist.init_process_group()
    sizes, meshes = axis_sizes(layout), _meshes.setdefault(_get_default_store(), {})
    key = (device_type, *sizes.values())
    if key not in meshes:
        meshes[key] = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    groups = [*meshes[key].get_all_groups(), *data_mesh(meshes[key]).get_all_groups()]  # all ranks open the last ones
    for group in groups if timeout_s else ():  # groups of a mesh do not inherit a timeout
        _set_pg_timeout(timedelta(seconds=timeout_s), group)
    return meshes[key]


class ShardMesh(NamedTuple):
    """Ranks that share a state."""

    mesh: DeviceMesh
    """The ranks, as FSDP2 shards over them: (shards), or (replicas, shards)."""
    reduction_group: dist.ProcessGroup | None
    """Second group of the shards, as that of `open_reduction_group`."""


class ExpertMesh(NamedTuple):
    """Ranks of a stage, as experts see them: neighbours split the experts, and others have the same ones."""

    ep: DeviceMesh
    """Ranks that split the experts, one axis; size 1 where each rank has all."""
    shards: ShardMesh
    """Ranks that have the same experts."""


def build_expert_mesh(layout: Layout, device_type: str, timeout_s: float = 0.0) -> ExpertMesh:
    """This rank's part of the mesh (pp, copies, shards, ep) over all ranks; call it on all of them, after `build_mesh`.

    Ranks of ep are neighbours among those of dp_shard, cp and tp. Copies of dp_replicate share no experts. Where the
    layout shards no state, the ranks with the same experts are copies too.
    """
    sizes, meshes = expert_sizes(layout), _meshes.setdefault(_get_default_store(), {})
    key = (device_type, "experts", *sizes.values())
    if (mesh := meshes.get(key)) is None:
        mesh = meshes[key] = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for group in mesh.get_all_groups() if timeout_s else ():
        _set_pg_timeout(timedelta(seconds=timeout_s), group)
    sharded = mesh[EXPERT_SHARDS] if sizes[EXPERT_COPIES] == 1 else mesh[EXPERT_COPIES, EXPERT_SHARDS]
    return ExpertMesh(mesh[EP], ShardMesh(sharded, _open_second_group(sharded, timeout_s)))


def token_mesh(mesh: DeviceMesh, timeout_s: float = 0.0) -> DeviceMesh:
    """The ranks of cp and tp as one axis: they share the tokens of a microbatch. `mesh` remembers it.

    Call it on all ranks; `timeout_s` is as for `build_mesh`.
    """
    axes = [axis for axis in (CP, TP) if mesh[axis].size() > 1]
    joined = mesh[CP, TP]._flatten("tokens") if len(axes) == 2 else mesh[(axes or [TP])[0]]
    if timeout_s:
        _set_pg_timeout(timedelta(seconds=timeout_s), joined.get_group())
    return joined


def open_host_group(timeout_s: float, patience_s: float) -> dist.ProcessGroup:
    """A group of all ranks over gloo, for messages from host to host that NCCL's watchdog does not watch.

    It is open after at most `timeout_s` seconds. Its collectives may then take `patience_s` seconds. InvalidLayout if
    hosts do not reach each other.
    """
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise InvalidLayout(
            f"the hosts do not reach each other: {(str(error).splitlines() or [''])[0]}; name the network interface "
            f"that they share in GLOO_SOCKET_IFNAME"
        ) from error
    assert group is not None, "every rank is in it"
    _set_pg_timeout(timedelta(seconds=patience_s), group)
    return group


def open_reduction_group(mesh: DeviceMesh, timeout_s: float = 0.0) -> dist.ProcessGroup | None:
    """A second group of the ranks that share parameters, for reducing gradients; None where the first group does both.

    A group is a communicator of NCCL, which finishes one collective before it begins the next. With one group, a
    reduce-scatter would wait for all-gathers that backward sends ahead. Open it on all of these ranks together;
    `timeout_s` is as for `build_mesh`.
    """
    return _open_second_group(data_mesh(mesh), timeout_s)


def open_joint_group(mesh: DeviceMesh, axes: Sequence[int]) -> dist.ProcessGroup:
    """The group of the ranks that differ from this one along some axes of a mesh alone, in the mesh's order.

    It is the mesh's own for one axis; for several it is a new one, with the time limit of the first axis. Call it on
    all of its ranks together.
    """
    groups = [mesh.get_group(axis) for axis in axes]
    if len(groups) == 1:
        return groups[0]
    own = dist.get_rank()
    offsets = ([rank - own for rank in dist.get_process_group_ranks(group)] for group in groups)
    ranks = [own + sum(each) for each in product(*offsets)]  # axes lie at even distances
    assert ranks == sorted(ranks), "torch numbers the ranks of a group in their order"
    opened = _joint_groups.setdefault(_get_default_store(), {})
    if (found := opened.get(tuple(ranks))) is None:
        found = opened[tuple(ranks)] = _open_named_group("joint", ranks)
    options = getattr(groups[0]._get_backend(torch.device(mesh.device_type)), "options", None)
    if (limit := getattr(options, "_timeout", None)) is not None:  # a fake group has none
        _set_pg_timeout(limit, found)
    return found


def _open_named_group(purpose: str, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Open a group on its own ranks alone, with a name made of `purpose` and the ranks.

    torch's `new_group(use_local_synchronization=True)` counts this rank's groups to name it. Ranks with other counts,
    as where a timeline opened a group on some, would wait for ever for each other.
    """
    default, own = _get_default_group(), dist.get_rank()
    backend, store = _world.pg_map[default]
    name: Any = "_".join(["dtlayout", purpose, *map(str, ranks)])  # torch has a type of its own for names
    group, _ = _new_process_group_helper(
        len(ranks), ranks.index(own), list(ranks), dist.Backend(backend), store, name,
        timeout=_get_default_timeout(dist.Backend(backend)), device_id=default.bound_device_id,
    )  # fmt: skip
    _world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def _open_second_group(mesh: DeviceMesh, timeout_s: float) -> dist.ProcessGroup | None:
    shards = mesh.get_all_groups()[-1]
    if mesh.device_type != "cuda" or shards.size() == 1:
        return None
    ranks = dist.get_process_group_ranks(shards)
    groups = _reduction_groups.setdefault(_get_default_store(), {})
    if (group := groups.get(tuple(ranks))) is None:
        group = groups[tuple(ranks)] = _open_named_group("reduction", ranks)
    if timeout_s:
        _set_pg_timeout(timedelta(seconds=timeout_s), group)
    return group


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """View of the mesh that FSDP2 shards over: (replicas, shards) for HSDP and plain replication, else (shards).

    Ranks of cp have different tokens, like those of the data axes. So they are shards too, and the two axes become one.
    Where the state is replicated and not sharded, they are replicas.
    """
    if mesh[DP_REPLICATE].size() == 1:
        return mesh[DP_SHARD] if mesh[CP].size() == 1 else _join_with_cp(mesh)
    if mesh[CP].size() == 1:
        return mesh[DP_REPLICATE, DP_SHARD]
    joined, shards = _join_with_cp(mesh), mesh[DP_SHARD]
    return DeviceMesh._concatenate([joined, shards] if shards.size() == 1 else [mesh[DP_REPLICATE], joined])


def _join_with_cp(mesh: DeviceMesh) -> DeviceMesh:
    """One axis that joins cp with dp_shard, or with dp_replicate where nothing is sharded; `mesh` remembers it."""
    is_replicated = mesh[DP_SHARD].size() == 1 and mesh[DP_REPLICATE].size() > 1
    return mesh[DP_REPLICATE if is_replicated else DP_SHARD, CP]._flatten("data_cp")
