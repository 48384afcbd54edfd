"""What a mesh refuses and how long it is used; meshes that work are used by every test on ranks."""

import gc
import weakref
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtlayout.base.errors import InvalidLayout
from dtlayout.dryrun.world import fake_world
from dtlayout.mesh import build
from dtlayout.mesh.build import build_mesh, open_reduction_group
from dtlayout.spec.layout import Layout


def test_a_layout_of_another_world_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InvalidLayout, match="needs 8 ranks, this job has 4; start it with torchrun --nproc-per-node 8"):
        build_mesh(Layout(pp=2, dp_shard=2, tp=2), "cpu")


def test_the_same_degrees_get_the_same_mesh_as_long_as_the_process_group_lives() -> None:
    with fake_world(rank=1, world_size=4):
        mesh = build_mesh(Layout(dp_shard=2, tp=2), "cpu")
        assert build_mesh(Layout(dp_shard=2, tp=2, zero=3, micro_batch=2), "cpu") is mesh
        assert build_mesh(Layout(dp_replicate=2, tp=2), "cpu") is not mesh
        assert build_mesh(Layout(dp_shard=2, tp=2), "meta") is not mesh
    with fake_world(rank=3, world_size=4):
        again = build_mesh(Layout(dp_shard=2, tp=2), "cpu")
        assert (tuple(mesh.get_coordinate()), tuple(again.get_coordinate())) == ((0, 0, 0, 0, 1), (0, 0, 1, 0, 1))


def test_the_groups_of_a_mesh_end_a_collective_in_the_time_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, timedelta] = {}
    monkeypatch.setattr(build, "_set_pg_timeout", lambda limit, group: limits.update({group.group_name: limit}))
    with fake_world(rank=1, world_size=8):
        mesh = build_mesh(Layout(pp=2, dp_shard=2, tp=2), "cpu")
        assert not limits
        assert build_mesh(Layout(pp=2, dp_shard=2, tp=2), "cpu", timeout_s=45) is mesh
        names = {mesh[axis].get_group().group_name for axis in ("pp", "dp_shard", "tp")}
    assert names <= set(limits) and set(limits.values()) == {timedelta(seconds=45)}


def test_reductions_have_a_group_of_their_own_on_cuda_where_there_is_something_to_reduce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: dict[str, timedelta] = {}
    monkeypatch.setattr(build, "_set_pg_timeout", lambda limit, group: limits.update({group.group_name: limit}))
    with fake_world(rank=5, world_size=8):
        mesh, alone = build_mesh(Layout(pp=2, dp_shard=2, tp=2), "cpu"), build_mesh(Layout(pp=4, tp=2), "cpu")
        assert open_reduction_group(mesh) is None
        monkeypatch.setattr(DeviceMesh, "device_type", "cuda")
        assert open_reduction_group(alone) is None
        group = open_reduction_group(mesh)
        assert dist.get_process_group_ranks(group) == [5, 7]
        assert group is not mesh["dp_shard"].get_group() and not limits
        assert open_reduction_group(mesh, timeout_s=45) is group
        assert limits == {group.group_name: timedelta(seconds=45)}


def test_a_mesh_goes_with_its_process_group() -> None:
    with fake_world(rank=0, world_size=2):
        mesh, group = weakref.ref(build_mesh(Layout(tp=2), "cpu")), weakref.ref(dist.group.WORLD)
        gc.collect()
        assert mesh() is not None and group() is not None
    gc.collect()
    assert mesh() is None and group() is None
