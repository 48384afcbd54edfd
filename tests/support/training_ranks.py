"""What the tests of gradients and of the memory meter run on the pool's ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dtlayout.mesh.build import build_mesh, data_mesh
from dtlayout.mesh.opening import open_communicators
from dtlayout.spec.layout import Layout
from dtlayout.training.gradients import clip_gradients, local_squared_norm
from dtlayout.training.memory import MemoryMeter

SHAPES = ((8, 4), (7, 3), (5,), (1,), (2, 2))
"""Some split evenly over two ranks, some leave a rank with less or with nothing."""
PLACEMENTS = (
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Replicate(), Shard(0)),
    (Shard(0), Shard(0)),
    (Shard(0), Shard(-1)),
)


def make_gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def norm_and_clipped(layout: Layout, max_norm: float) -> tuple[float, float, list[list[list[float]]]]:
    """The norm before and after clipping, and every clipped gradient in whole, for every way to place them.

    The gradients are shared over the axes inside a stage; each of the `layout.pp` stages holds them all.
    """
    mesh = build_mesh(layout, "cpu")
    inside = mesh["dp_shard", "tp"]
    parameters = []
    for placements in PLACEMENTS:
        for whole in make_gradients():
            gradient = distribute_tensor(whole, inside, placements)
            parameter = nn.Parameter(torch.zeros_like(gradient))
            parameter.grad = gradient
            parameters.append(parameter)
    parameters.append(nn.Parameter(torch.zeros(3)))  # without a gradient
    norm = _norm(parameters, mesh)
    clip_gradients(parameters, norm, max_norm)
    whole = [p.grad.full_tensor().tolist() for p in parameters if isinstance(p.grad, DTensor)]
    return float(norm), float(_norm(parameters, mesh)), whole


def norm_over_two_meshes() -> float:
    """Of a gradient on (dp_shard, tp) and the same on dp_shard alone: its tp copies count once."""
    mesh = init_device_mesh("cpu", (1, 1, 2, 1, 2), mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    parameters = []
    for part, placements in ((mesh["dp_shard", "tp"], (Shard(0), Shard(1))), (mesh["dp_shard"], (Shard(0),))):
        gradient = distribute_tensor(make_gradients()[0], part, placements)
        parameters.append(nn.Parameter(torch.zeros_like(gradient)))
        parameters[-1].grad = gradient
    return float(_norm(parameters, mesh))


def measured_peaks(layout: Layout, kibibytes: list[int]) -> tuple[list[list[int]], list[list[int] | None]]:
    """What a meter gathers and remembers, step by step, when rank r allocates r kibibytes on top of the step's."""
    module = nn.Linear(1, 1, bias=False)
    meter = MemoryMeter("cpu", [module], torch.optim.AdamW(module.parameters()))
    gathered, remembered = [], [meter.peaks_by_pp_rank]
    for count in kibibytes:
        with meter.watch():
            torch.empty(1024 * (dist.get_rank() + count), dtype=torch.uint8).zero_()
        gathered.append(meter.gather_peaks(layout))
        remembered.append(meter.peaks_by_pp_rank)
    return gathered, remembered


def _norm(parameters: list[nn.Parameter], mesh: object) -> torch.Tensor:
    squared = local_squared_norm(parameters, mesh)
    dist.all_reduce(squared)
    return squared.sqrt()


def opened_communicators(layouts: Sequence[Layout]) -> list[list[str]]:
    """Names of what each of these layouts opens."""
    found = []
    for layout in layouts:
        mesh = build_mesh(layout, "cpu")
        found.append(open_communicators(mesh, [None, *data_mesh(mesh).get_all_groups()]))
    return found
