"""The tracker under FSDP2 and DTensor. Four Linear(16, 16) units: 4 x (16 x 16 + 16) x 4 bytes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtlayout.measure.ledger import Footprint
from dtlayout.measure.memory import StorageTracker

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

UNIT_BYTES = 4 * (16 * 16 + 16)
OUTPUT_BYTES = 4 * 8 * 16


def build_units(**options) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    for unit in model:
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def run_step(model, optimizer, tracker, reduce_each_microbatch=True) -> list[Footprint]:
    """Three microbatches; what was alive after each forward and each backward, and at the end."""
    footprints = []
    with tracker:
        x = torch.ones(8, 16)
        for microbatch in range(3):
            model.set_requires_gradient_sync(reduce_each_microbatch or microbatch == 2)
            loss = model(x).sum()
            footprints.append(tracker.current)
            loss.backward()
            del loss
            footprints.append(tracker.current)
        optimizer.step()
        optimizer.zero_grad()
        del x
    return [*footprints, tracker.current]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_one_real_rank_holds_whole_shards_and_repeats_its_peak(reshard_after_forward):
    model = build_units(reshard_after_forward=reshard_after_forward)
    optimizer = torch.optim.AdamW(model.parameters())
    tracker = StorageTracker([model], [optimizer])
    peaks = []
    for _ in range(3):
        tracker.ledger.forget_peak()
        footprints = run_step(model, optimizer, tracker)
        peaks.append((tracker.ledger.peak, tracker.ledger.category_peaks))
        assert {footprint.parameter for footprint in footprints} == {4 * UNIT_BYTES}
        assert [footprint.gradient for footprint in footprints[1:6:2]] == [4 * UNIT_BYTES] * 3
        assert [footprint.gathered for footprint in footprints[:6:2]] == [
            0 if reshard_after_forward else 4 * UNIT_BYTES
        ] * 3
    assert footprints[-1] == Footprint(parameter=4 * UNIT_BYTES, optimizer=8 * UNIT_BYTES + 8 * 4)
    assert peaks[1] == peaks[2]


@pytest.mark.usefixtures("two_fake_ranks")
def test_zero_3_holds_half_of_everything_and_gathers_two_units_at_most():
    model = build_units()
    optimizer = torch.optim.AdamW(model.parameters())
    tracker = StorageTracker([model], [optimizer])
    footprints = run_step(model, optimizer, tracker)
    sharded_bytes = 2 * UNIT_BYTES
    assert {footprint.parameter for footprint in footprints} == {sharded_bytes}
    assert [footprint.gradient for footprint in footprints[1:6:2]] == [sharded_bytes] * 3
    # Each Linear's input is saved; the first one's is the batch, made inside the block.
    assert [footprint.activation for footprint in footprints[:6:2]] == [4 * OUTPUT_BYTES] * 3
    assert footprints[-1] == Footprint(parameter=sharded_bytes, optimizer=2 * sharded_bytes + 8 * 4)
    assert UNIT_BYTES <= tracker.ledger.category_peaks.gathered <= 2 * UNIT_BYTES


@pytest.mark.usefixtures("two_fake_ranks")
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
def test_unreduced_gradients_are_gradients_in_the_reduce_dtype(param_dtype):
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    model = build_units(mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters())
    tracker = StorageTracker([model], [optimizer])
    footprints = run_step(model, optimizer, tracker, reduce_each_microbatch=False)
    # All four units in fp32; and the one that backward has just made.
    newest_bytes = UNIT_BYTES * param_dtype.itemsize // 4
    assert tracker.ledger.category_peaks.gradient == 4 * UNIT_BYTES + newest_bytes
    assert footprints[5].gradient == 2 * UNIT_BYTES  # reduced


@pytest.mark.usefixtures("two_fake_ranks")
def test_gathered_units_are_recognised_under_tensor_parallelism():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tp"))
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"], reshard_after_forward=False)
    tracker = StorageTracker([model])
    local_bytes = 2 * 16 * 16 * 4 // 2
    for _ in range(2):
        with tracker:
            loss = model(torch.ones(8, 16)).sum()
            assert tracker.current.parameter == tracker.current.gathered == local_bytes
            loss.backward()
            assert tracker.current.gradient == local_bytes
            assert tracker.current.gathered == 0
            model.zero_grad()


@pytest.mark.usefixtures("two_fake_ranks")
def test_dtensors_count_their_local_shards():
    mesh = init_device_mesh("cpu", (2,))
    with StorageTracker() as tracker:
        whole = torch.zeros(100)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        del whole
        assert isinstance(sharded, DTensor)
        assert sharded.to_local().untyped_storage().nbytes() == tracker.current.total
        doubled = sharded * 2
        assert tracker.current.total == sharded.to_local().untyped_storage().nbytes() + doubled.to_local().nbytes


@pytest.mark.usefixtures("two_fake_ranks")
def test_results_of_functional_collectives_count():
    with StorageTracker() as tracker:
        gathered = functional.all_gather_tensor(torch.zeros(100), 0, dist.group.WORLD)
        assert tracker.current.total == 800
        total = gathered + 1
        del gathered
        assert tracker.current.total == total.nbytes == 800
