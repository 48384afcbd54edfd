"""Tied embeddings on two pipeline ranks: what their exchange asks of the process group, and what comes of it."""

from queue import Queue
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dtlayout.pipelining import tied
from dtlayout.schedules.placement import Looped


class Mesh(dict):
    """Axes by name, as a DeviceMesh has them."""

    device_type = "cpu"


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_only_the_ends_take_part_one_after_the_other(num_ranks, monkeypatch):
    """A batch of messages would open NCCL's communicator of the whole group, which the ranks between never join."""
    ends, said = (0, num_ranks - 1), []
    mail = {end: Queue() for end in ends}

    def send(tensor, *, group, group_dst):
        said.append(("send", group.rank(), group_dst))
        mail[group_dst].put(tensor.clone())

    def receive(tensor, *, group, group_src):
        said.append(("receive", group.rank(), group_src))
        tensor.copy_(mail[group.rank()].get(timeout=10))

    monkeypatch.setattr(tied.dist, "send", send)
    monkeypatch.setattr(tied.dist, "recv", receive)
    modules = {rank: nn.Embedding(3, 2) for rank in range(num_ranks)}
    for rank, module in modules.items():
        module.weight.grad = torch.full((3, 2), float(10**rank))

    def take_part(rank: int) -> None:
        mesh = Mesh(pp=SimpleNamespace(get_group=lambda: SimpleNamespace(rank=lambda: rank)))
        aliases = {"weight": "weight"}
        tied.sum_tied_gradients([modules[rank]], aliases, mesh, Looped(num_ranks, 1))

    threads = [Thread(target=take_part, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert [rank for _, rank, _ in said if rank not in ends] == []
    assert [what for what, rank, _ in said if rank == 0] == ["send", "receive"]
    assert [what for what, rank, _ in said if rank == ends[1]] == ["receive", "send"]
    both = 1.0 + 10 ** (num_ranks - 1)
    assert all((modules[end].weight.grad == both).all() for end in ends)
