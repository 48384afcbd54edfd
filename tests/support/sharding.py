"""What ranks report of themselves for tests/distributed/test_sharding.py: collectives, bytes, weights, sabotage."""

from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from parity import Case, Share, build_step, local_rows, named_parameters, run_layout
from recording import CollectiveRecorder
from routing import routed_as_stated
from torch.distributed.device_mesh import DeviceMesh

from dtlayout.dryrun.collectives import Collective
from dtlayout.measure.ledger import Footprint
from dtlayout.measure.memory import StorageTracker
from dtlayout.mesh.build import open_reduction_group


def count_collectives(case: Case, axes: tuple[str, ...]) -> Counter[str]:
    """Collectives along some axes in the second step's forwards and backwards."""
    return Counter(event.name for event in _record(case, axes))


def weigh_collectives(case: Case, axes: tuple[str, ...]) -> Counter[str]:
    """As `count_collectives`, their bytes."""
    weights = Counter[str]()
    for event in _record(case, axes):
        weights[event.name] += event.nbytes
    return weights


def _record(case: Case, axes: tuple[str, ...]) -> list[Collective]:
    assembly, step = build_step(case)
    rows, targets = local_rows(case)
    step(rows, targets)
    groups = {tuple(dist.get_process_group_ranks(assembly.mesh[axis].get_group())) for axis in axes}
    with CollectiveRecorder() as recorder:
        assembly.runtime.step(rows, targets=targets, num_targets=1.0)
    return [event for event in recorder.events if event.ranks in groups and len(event.ranks) > 1]


def list_exchanges(case: Case) -> Counter[int]:
    """Bytes of each all-to-all along dp_shard, where the fullest of ep's ranks gets as much as `imbalance` says."""
    with routed_as_stated(case):
        return Counter(event.nbytes for event in _record(case, ("dp_shard",)) if event.name == "all_to_all")


def measure_bytes(case: Case) -> tuple[Footprint, Footprint]:
    """What is alive after the backwards of the second step, and the largest of each category during them."""
    assembly, step = build_step(case)
    rows, targets = local_rows(case)
    step(rows, targets)
    tracker = StorageTracker(assembly.modules, [step.optimizer])
    with tracker:
        assembly.runtime.step(rows, targets=targets, num_targets=1.0)
    return tracker.current, tracker.ledger.category_peaks


def initial_weights(case: Case) -> dict[str, np.ndarray]:
    """The whole initial weights of this rank's stages."""
    assembly, _ = build_step(case)
    return {name: p.detach().full_tensor().numpy() for name, p in named_parameters(assembly, case)}


def run_sabotaged(case: Case, dropped: str) -> Share:
    """The step with one collective left out: its local part is taken for the whole."""
    with SABOTAGE[dropped]():
        return run_layout(case)


def _keep_own_chunk(output: torch.Tensor, input: torch.Tensor, *_: object, group: dist.ProcessGroup, **__: object):
    output.copy_(input.chunk(group.size())[group.rank()])


def _keep_local_sum(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return tensor.clone()


_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
"""What FSDP2 calls: 2.13 gave it a new name."""

_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def train_in_two_groups(case: Case) -> tuple[Share, set[tuple[str, str, tuple[int, ...]]]]:
    """Steps where reductions have a group of their own, as on CUDA: kind, name and ranks of the groups of FSDP2."""
    groups: set[tuple[str, str, tuple[int, ...]]] = set()

    def open_on_cuda(mesh: DeviceMesh, timeout_s: float) -> dist.ProcessGroup | None:
        with mock.patch.object(DeviceMesh, "device_type", "cuda"):
            return open_reduction_group(mesh, timeout_s)

    def watch(kind: str) -> mock._patch:
        send = getattr(dist, kind)

        def send_and_tell(*args: Any, group: dist.ProcessGroup, **kwargs: Any) -> Any:
            groups.add((kind, group.group_name, tuple(dist.get_process_group_ranks(group))))
            return send(*args, group=group, **kwargs)

        return mock.patch.object(dist, kind, send_and_tell)

    with mock.patch("dtlayout.training.build.open_reduction_group", open_on_cuda):
        build_step(case)  # a second trainer of these degrees has the same groups
        with watch(_ALL_GATHER), watch(_REDUCE_SCATTER):
            return run_layout(case), groups


SABOTAGE = {
    "gradients over dp": lambda: mock.patch.object(dist, _REDUCE_SCATTER, _keep_own_chunk),
    "activations over tp": lambda: mock.patch("dtlayout.plans.collectives._all_reduce", _keep_local_sum),
    "loss over tp": lambda: mock.patch("dtlayout.plans.styles.dist.all_reduce"),
    "keys and values over cp": lambda: mock.patch("dtlayout.plans.context._begin_pass", _keep_local_sum),
    "tied gradients over pp": lambda: mock.patch("dtlayout.training.step.sum_tied_gradients"),
}
