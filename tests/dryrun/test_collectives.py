import pytest
import torch
import torch.distributed as dist
from recording import CollectiveRecorder
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


def build_units(**options) -> nn.Module:
    """Three units of Linear(4, 4) without bias, 64 bytes each."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    for unit in model:
        fully_shard(unit, **options)
    return fully_shard(model, **options)


@pytest.mark.usefixtures("two_fake_ranks")
@pytest.mark.parametrize(("reshard_after_forward", "num_all_gathers"), [(True, 6), (False, 3)])
def test_fsdp_gathers_each_unit_forward_and_again_backward_if_it_was_resharded(reshard_after_forward, num_all_gathers):
    model = build_units(reshard_after_forward=reshard_after_forward)
    with CollectiveRecorder() as recorder:
        model(torch.ones(2, 4)).sum().backward()
    assert recorder.counts() == {"all_gather": num_all_gathers, "reduce_scatter": 3}
    assert {event.nbytes for event in recorder.events} == {64}
    assert {event.ranks for event in recorder.events} == {(0, 1)}


@pytest.mark.usefixtures("one_rank")
def test_fsdp_on_one_rank_issues_no_gather():
    model = build_units()
    with CollectiveRecorder() as recorder:
        model(torch.ones(2, 4)).sum().backward()
    assert recorder.counts()["all_gather"] == 0


@pytest.mark.usefixtures("one_rank")
def test_functional_collectives_are_recorded_once_each():
    with CollectiveRecorder() as recorder:
        reduced = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
        assert (reduced + 1).tolist() == [2.0] * 4
        functional.all_gather_tensor(torch.ones(4), 0, dist.group.WORLD).wait()
        functional.reduce_scatter_tensor(torch.ones(4), "sum", 0, dist.group.WORLD).wait()
        functional.all_to_all_single(torch.ones(4), None, None, dist.group.WORLD).wait()
    assert recorder.counts() == {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
    assert {(event.ranks, event.nbytes) for event in recorder.events} == {((0,), 16)}


@pytest.mark.usefixtures("two_fake_ranks")
def test_plain_collectives_have_plain_names_and_message_sizes():
    x, both = torch.ones(2), torch.ones(4)
    with CollectiveRecorder() as recorder:
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather([torch.ones(2), torch.ones(2)], x)
        dist.all_gather_into_tensor(both, x)
        dist.reduce_scatter_tensor(x, both)
        dist.all_to_all_single(both, torch.ones(4))
        dist.send(x, 1)
        dist.recv(x, 1)
        dist.barrier()
    assert [(event.name, event.nbytes) for event in recorder.events] == [
        ("all_reduce", 8),
        ("broadcast", 8),
        ("all_gather", 16),
        ("all_gather", 16),
        ("reduce_scatter", 16),
        ("all_to_all", 16),
        ("send", 8),
        ("recv", 8),
        ("barrier", 0),
    ]


@pytest.mark.usefixtures("two_fake_ranks")
def test_the_group_is_that_of_the_call():
    alone = dist.new_group([0])
    with CollectiveRecorder() as recorder:
        dist.all_reduce(torch.ones(2), group=alone)
        dist.all_reduce(torch.ones(2))
    assert [event.ranks for event in recorder.events] == [(0,), (0, 1)]


@pytest.mark.usefixtures("two_fake_ranks")
def test_dtensor_redistribution_shows_the_collectives_inside():
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with CollectiveRecorder() as recorder:
        sharded.redistribute(mesh, [Replicate()])
        total = sharded.sum()
        assert total.placements == (Partial(),)
        total.redistribute(mesh, [Replicate()])
    assert recorder.counts() == {"all_gather": 1, "all_reduce": 1}


@pytest.mark.usefixtures("two_fake_ranks")
def test_fake_tensors_issue_the_same_collectives():
    with FakeTensorMode(), CollectiveRecorder() as recorder:
        dist.all_reduce(torch.ones(2))
        functional.all_gather_tensor(torch.ones(2), 0, dist.group.WORLD)
    assert [(event.name, event.nbytes, event.ranks) for event in recorder.events] == [
        ("all_reduce", 8, (0, 1)),
        ("all_gather", 16, (0, 1)),
    ]
