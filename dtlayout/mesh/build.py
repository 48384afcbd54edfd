"""Layout → DeviceMesh, and the views of it that the parts of a step talk over."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtlayout.layout import Layout
from dtlayout.mesh.axes import DP_REPLICATE, DP_SHARD, axis_sizes


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh (pp, dp_replicate, dp_shard, cp, tp) over all ranks; axes of size 1 are there too.

    Initialises torch.distributed from the environment that torchrun sets, if nobody has. Slice it by name:
    `mesh["tp"]`. The product of the degrees must be the world size (RuntimeError).
    """
    sizes = axis_sizes(layout)
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The view that FSDP2 shards over: (dp_replicate, dp_shard) for HSDP and plain replication, else (dp_shard)."""
    return mesh[DP_REPLICATE, DP_SHARD] if mesh[DP_REPLICATE].size() > 1 else mesh[DP_SHARD]
