"""What tests of Muon run on the pool's ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from memory_ranks import measure_peaks
from parity import Case, Share, build_step, local_rows, local_starts, run_layout
from recording import CollectiveRecorder
from torch import Tensor

from dtlayout.costmodel.muon import _count_workspace
from dtlayout.dryrun.collectives import Collective
from dtlayout.mesh.build import build_mesh, open_joint_group
from dtlayout.plans.collectives import Group, begin_exchange
from dtlayout.spec.layout import Layout
from dtlayout.spec.newton_schulz import plan_buckets
from dtlayout.training import muon


class Sent(NamedTuple):
    """One exchange of tiles, as a rank issued it."""

    dtype: torch.dtype
    to_ranks: list[int]
    from_ranks: list[int]


def run_in_small_buckets(case: Case) -> Share:
    """As `run_layout`, with as many matrices in a bucket as there are ranks."""
    with small_buckets():
        return run_layout(case)


@contextmanager
def small_buckets(most_elements: int = 1) -> Iterator[None]:
    """Buckets hold no more elements for each rank than this, or a matrix."""
    with mock.patch("dtlayout.spec.newton_schulz.BUCKET_ELEMENTS", most_elements):
        _count_workspace.cache_clear()
        yield
    _count_workspace.cache_clear()


def measure_small_buckets(case: Case, most_elements: int) -> list[int]:
    """As `measure_peaks`, with small buckets."""
    with small_buckets(most_elements):
        return measure_peaks(case)


def run_by_shards(case: Case) -> Share:
    """As `run_layout`, with every tile made orthogonal for itself: another optimizer."""

    make_teams = muon._make_teams

    def make_teams_of_one(param_groups: list[dict]) -> list[muon.Team]:
        found = []
        for matrix in (matrix for team in make_teams(param_groups) for matrix in team.matrices):
            rows, columns = muon.local_part(matrix.parameter).shape[-2:]
            whole = ((slice(0, rows), slice(0, columns)),)
            found.append(matrix._replace(shape=(rows, columns), tiles=whole))
        return [muon.Team(None, found, plan_buckets([each.shape for each in found], 1))]

    with mock.patch.object(muon, "_make_teams", make_teams_of_one):
        return run_layout(case)


def describe_joint_group(layout: Layout, timeout_s: float) -> tuple[list[int], float, bool]:
    """Ranks of the group of dp_shard and tp, its time limit in seconds, and whether it is opened once."""
    mesh = build_mesh(layout, "cpu", timeout_s)
    axes = [mesh.mesh_dim_names.index(axis) for axis in ("dp_shard", "tp")]
    group = open_joint_group(mesh, axes)
    limit = group._get_backend(torch.device("cpu")).options._timeout
    is_kept = group is open_joint_group(mesh, axes) and open_joint_group(mesh, axes[:1]) is mesh.get_group("dp_shard")
    return dist.get_process_group_ranks(group), limit.total_seconds(), is_kept


def sum_over_joint_group(layout: Layout) -> float:
    """Ones summed up over the group of dp_shard and tp, where the first rank is in a group more than the others."""
    mesh = build_mesh(layout, "cpu")
    dist.new_group([0])
    ones = torch.ones(1)
    dist.all_reduce(
        ones, group=open_joint_group(mesh, [mesh.mesh_dim_names.index(axis) for axis in ("dp_shard", "tp")])
    )
    return ones.item()


def list_sent(case: Case) -> tuple[list[Sent], list[Collective]]:
    """What the update of a second step sends, and all of its collectives."""
    _, step = build_step(case)
    step(*local_rows(case), local_starts(case))
    sent = list[Sent]()

    def note(x: Tensor, group: Group, to_ranks: list[int], from_ranks: list[int]) -> Tensor:
        sent.append(Sent(x.dtype, list(to_ranks), list(from_ranks)))
        return begin_exchange(x, group, to_ranks, from_ranks)

    recorder = CollectiveRecorder()
    update = step.optimizer.step

    def record_update() -> None:
        with mock.patch.object(muon, "begin_exchange", note), recorder:
            update()

    with mock.patch.object(step.optimizer, "step", record_update):
        step(*local_rows(case), local_starts(case))
    return sent, [event for event in recorder.events if len(event.ranks) > 1]
