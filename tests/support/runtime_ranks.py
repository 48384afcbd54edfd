"""What ranks do for tests/distributed/test_runtime.py."""

import torch
import torch.distributed as dist
from torch import nn

from dtlayout.mesh.build import build_mesh
from dtlayout.pipelining.runtime import Runtime, build_runtime
from dtlayout.pipelining.schedule import make_schedule
from dtlayout.pipelining.stage import Boundary
from dtlayout.spec.batch import Batch
from dtlayout.spec.layout import Layout

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


def step_with_three_contexts() -> None:
    """Four microbatches."""
    _build([nn.Linear(8, 8)], width=8).step(torch.zeros(4, 8), ["a", "b", "c"])


def note_contexts() -> list[tuple[float, str]]:
    """The first number that this rank's stage gets of each microbatch, and the context with it."""
    stage = _Noting()
    contexts = ["a", "b", "c", "d"]
    _build([stage], width=8).step(torch.arange(4.0)[:, None].expand(4, 8), contexts)
    return stage.noted


class _Noting(nn.Module):
    """Hands on what it gets, times one; the last stage the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))
        self.noted: list[tuple[float, str]] = []

    def forward(self, x: torch.Tensor, context: str) -> torch.Tensor:
        self.noted.append((x[0, 0].item(), context))
        return x * self.one if dist.get_rank() < LAYOUT.pp - 1 else (x * self.one).sum()


def _build(modules: list[nn.Module], width: int) -> Runtime:
    mesh = build_mesh(LAYOUT, "cpu")
    boundary = Boundary(shape=(1, width), dtype=torch.float32)
    return build_runtime(modules, make_schedule(LAYOUT, BATCH), [], mesh, boundary)
