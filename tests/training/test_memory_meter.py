"""The memory meter: whose peak it reports, and that it remembers the largest."""

import pytest
import torch
from torch import nn
from training_ranks import measured_peaks

from dtlayout.measure.ledger import UPDATE
from dtlayout.schedules.actions import Action, Kind
from dtlayout.spec.layout import Layout
from dtlayout.training.memory import MemoryMeter

KIB = 1024


@pytest.mark.parametrize(
    ("layout", "largest_ranks"),
    [(Layout(pp=2, tp=2), [1, 3]), (Layout(dp_shard=4), [3]), (Layout(pp=4), [0, 1, 2, 3])],
    ids=["pp2 tp2", "dp4", "pp4"],
)
def test_each_pipeline_rank_reports_the_largest_of_its_other_axes(ranks4, layout, largest_ranks):
    sizes = [8, 32, 16]
    answers = ranks4.run(measured_peaks, layout, sizes)
    assert answers == [answers[0]] * 4  # every rank knows
    gathered, remembered = answers[0]
    for peaks, size in zip(gathered, sizes, strict=True):
        above = [peak - (rank + size) * KIB for peak, rank in zip(peaks, largest_ranks, strict=True)]
        assert all(0 <= rest < KIB / 2 for rest in above)  # a parameter of 4 bytes
    assert remembered == [None, gathered[0], gathered[1], gathered[1]]


def test_on_cuda_the_allocators_peaks_are_a_steps_and_each_actions(one_rank, cuda):
    module = nn.Linear(2, 2)
    meter = MemoryMeter("cuda", [module], torch.optim.SGD(module.parameters()))
    seen = cuda.statistics
    with meter.watch():
        seen["allocated"] = 4  # before the first action
        meter.mark(Action(Kind.FORWARD, 0, 0))
        seen["allocated"] = 9
        meter.mark(None)
        seen |= {"allocated": 6, "reserved": 12}
    assert [(each.action, each.nbytes) for each in meter.curve] == [("0F0", 9), (UPDATE, 6)]
    assert seen["resets"] == 3, "each action's peak is its own"
    assert (meter.gather_peaks(Layout()), meter.reserved_bytes) == ([9], 12)


def test_a_cpu_reserves_nothing(one_rank):
    module = nn.Linear(2, 2)
    meter = MemoryMeter("cpu", [module], torch.optim.SGD(module.parameters()))
    with meter.watch():
        module(torch.ones(2))
        meter.mark(None)
    assert [each.action for each in meter.curve] == [UPDATE]
    assert meter.gather_peaks(Layout())[0] > 0 and meter.reserved_bytes is None
