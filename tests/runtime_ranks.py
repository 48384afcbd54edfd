"""What ranks do for tests/distributed/test_runtime.py."""

import torch
from torch import nn

from dtlayout.batch import Batch
from dtlayout.layout import Layout
from dtlayout.mesh.build import build_mesh
from dtlayout.pipelining.runtime import Runtime, build_runtime
from dtlayout.pipelining.schedule import make_schedule
from dtlayout.pipelining.stage import Boundary

LAYOUT, BATCH = Layout(pp=4), Batch(global_batch=4, seq_len=1)


def step_with_wrong_boundary() -> None:
    """The stages hand on rows of 8 numbers, the boundary says 4."""
    _build([nn.Linear(8, 8)], width=4).step(torch.zeros(4, 8))


def build_with_too_many_stages() -> None:
    """Two modules for a rank that holds one stage."""
    _build([nn.Linear(8, 8), nn.Linear(8, 8)], width=8)


def step_with_an_odd_batch() -> None:
    """Four microbatches, five rows."""
    _build([nn.Linear(8, 8)], width=8).step(torch.zeros(5, 8))


def _build(modules: list[nn.Module], width: int) -> Runtime:
    mesh = build_mesh(LAYOUT, "cpu")
    boundary = Boundary(shape=(1, width), dtype=torch.float32)
    return build_runtime(modules, make_schedule(LAYOUT, BATCH), [], mesh, boundary)
