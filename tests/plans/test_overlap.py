"""Async tp over memory that GPUs share: who may use it, and that torch's operators get what they expect."""

import pytest
import torch
import torch.distributed as dist
from cuda import StandInCuda
from torch.distributed import _symmetric_memory

from dtlayout.dryrun.world import fake_world
from dtlayout.mesh.build import build_mesh
from dtlayout.plans import collectives, overlap
from dtlayout.plans.collectives import Group
from dtlayout.plans.overlap import gather_while_multiplying, multiply_while_scattering
from dtlayout.spec.layout import Layout


@pytest.mark.parametrize(
    ("per_node", "num_gpus", "reached", "shares"),
    [
        ("4", 4, True, True),
        ("2", 2, True, False),  # tp spans two nodes
        ("4", 2, True, False),  # other ranks' GPUs are not visible to this one
        ("4", 4, False, False),
    ],
)
def test_ranks_share_memory_in_one_node_where_each_gpu_reaches_the_others(
    monkeypatch: pytest.MonkeyPatch, per_node: str, num_gpus: int, reached: bool, shares: bool
) -> None:
    asked = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", per_node)
    StandInCuda(monkeypatch, num_devices=num_gpus)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: asked.append(pair) or reached)
    with fake_world(rank=1, world_size=4):
        mesh = build_mesh(Layout(tp=4), "cpu")["tp"]
        assert not Group.of(mesh).shares_memory and not asked
        monkeypatch.setattr(type(mesh), "device_type", "cuda")
        assert Group.of(mesh).shares_memory == shares
    assert len(asked) == (12 if shares else 1 if not reached else 0)


@pytest.mark.usefixtures("one_rank")
def test_shared_memory_gives_what_pieces_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank, with torch's own references for its CUDA kernels; on four, tests/distributed/test_parity.py."""
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", "CPU"):
            torch.library.impl(f"symm_mem::{name}", "CPU", getattr(_symmetric_memory, f"_{name}_fallback"))
    x, *weights = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 8, 4), (6, 4), (3, 4), (5, 6)))
    found = []
    for shares_memory in (False, True):
        group = Group(dist.group.WORLD.group_name, 1, 0, shares_memory)
        leaves = [each.clone().requires_grad_() for each in (x, *weights)]
        wide, narrow = gather_while_multiplying(leaves[0], leaves[1:3], group)
        result = multiply_while_scattering(wide, leaves[3], group)
        found.append([result, narrow, *torch.autograd.grad(result.sum() + narrow.square().sum(), leaves)])
    for pieces, shared in zip(*found, strict=True):
        torch.testing.assert_close(pieces, shared)


def test_all_collectives_begin_at_once_but_on_a_cpu() -> None:
    begun: list[int] = []

    def begin():  # type: ignore[no-untyped-def]
        for number in range(3):
            begun.append(number)
            yield torch.tensor(number)

    next(iter(overlap._begin_all(begin(), torch.device("cpu"))))
    assert begun == [0]
    assert len([*overlap._begin_all(begin(), torch.device("cuda"))]) == 3 and begun == [0, 0, 1, 2]
    assert collectives.Group is Group
