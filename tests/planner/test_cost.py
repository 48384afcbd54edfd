"""Costs of a training, and clusters that stand out."""

import pytest

from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.presets import PRESETS
from dtlayout.planner.cost import Budget, Marks, TrainingCost, find_cost, find_marks
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu


def scenario_on(gpu, num_gpus):
    return Scenario(
        model=PRESETS["llama3.1-8b"], batch=Batch(global_batch=100, seq_len=1000), engine=find_engine("dtlayout", gpu),
        cluster=Cluster(gpu=find_gpu(gpu), num_gpus=num_gpus, gpus_per_node=8),
    )  # fmt: skip


def test_days_hours_energy_and_money_follow_from_the_steps():
    cost = find_cost(scenario_on("h100-80g-sxm", 16), 3.6, Budget(tokens=100_000_000, price=2.0))
    assert cost == TrainingCost(
        steps=1000, days=pytest.approx(1 / 24), gpu_hours=16.0, energy_mwh=16 * 700 / 1e6, money=32.0
    )


def test_a_step_that_is_not_full_is_a_step_and_what_nobody_says_is_unknown():
    cost = find_cost(scenario_on("cpu", 1), 3600, Budget(tokens=100_001))
    assert (cost.steps, cost.gpu_hours, cost.energy_mwh, cost.money) == (2, 2.0, None, None)


def costs(*pairs):
    return [pair and TrainingCost(1, *pair, None, None) for pair in pairs]


@pytest.mark.parametrize(
    ("found", "marks"),
    [
        (costs((100, 10), (51, 10.2), (26, 10.5), (16, 20)), Marks(0, 3, 2)),
        (costs(None, (100, 10), None), Marks(1, 1, None)),
        (costs((100, 10), (50, 20)), Marks(0, 1, None)),
        (costs((100, 10), (90, 30), (50, 20)), Marks(0, 2, None)),  # beyond both is no knee
        (costs((10, 10), (20, 10)), Marks(0, 0, None)),
        (costs((50, 11), (100, 10), (50, 12)), Marks(1, 0, None)),
    ],
)
def test_cheapest_fastest_and_the_knee_between_them(found, marks):
    assert find_marks(found) == marks


def test_nothing_that_fits_has_no_marks():
    assert find_marks([None, None]) is None
