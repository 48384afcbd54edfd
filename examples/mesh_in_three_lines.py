"""A layout becomes a mesh with named axes; a collective over one axis reaches the ranks that share all the others.

torchrun --nproc-per-node 4 examples/mesh_in_three_lines.py
"""

import torch
import torch.distributed as dist

from dtlayout import Layout, build_mesh
from dtlayout.mesh.axes import coordinate, ranks_along

layout = Layout(dp_shard=2, tp=2)
mesh = build_mesh(layout, "cpu")
group = mesh["tp"].get_group()

rank = dist.get_rank()
total = torch.tensor(rank)
dist.all_reduce(total, group=group)
place = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))
print(f"rank {rank} is at {place}; the ranks of its tp group add up to {int(total)}\n", end="")

# Without torch the layout alone says the same.
assert place == coordinate(rank, layout)
assert int(total) == sum(ranks_along("tp", rank, layout))
dist.destroy_process_group()
