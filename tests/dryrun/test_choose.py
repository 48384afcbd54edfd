"""Which ranks are run dry, and with which operators."""

import pytest

from dtlayout.costmodel.engine import OWN_ENGINE, find_engine_on
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.scenario import Scenario
from dtlayout.dryrun.choose import fullest_ranks
from dtlayout.dryrun.operators import GlooCopies, list_stand_ins
from dtlayout.dryrun.rank import _see_copies
from dtlayout.models.presets import PRESETS
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout


@pytest.mark.parametrize(
    ("layout", "fullest"),
    [
        (Layout(dp_shard=16, zero=3), [0]),
        (Layout(pp=8, dp_shard=2), [0]),
        (Layout(pp=2, dp_shard=8, schedule="interleaved-1f1b", virtual_stages=8), [0, 8]),
    ],
    ids=str,
)
def test_a_rank_that_is_predicted_to_hold_much_less_is_not_asked_for_the_peak(layout: Layout, fullest: list[int]):
    gpu = find_gpu("h100-80g-sxm")
    scenario = Scenario(
        model=PRESETS["llama3.1-8b"],
        batch=Batch(global_batch=256, seq_len=8192),
        cluster=Cluster(gpu=gpu, num_gpus=16, gpus_per_node=8),
        engine=find_engine_on(OWN_ENGINE, gpu),
    )
    estimate = Estimator(scenario).estimate(layout, Kernels())
    assert fullest_ranks(layout, estimate) == fullest


def test_operators_stand_in_for_those_of_a_gpu_alone() -> None:
    replaced = {kernel.name for kernel in list_stand_ins("cuda")}
    assert {"sdpa-flash", "sdpa-cudnn", "fused"} <= replaced and "sdpa-math" not in replaced
    assert list_stand_ins("cpu") == []
    assert isinstance(_see_copies("cpu"), GlooCopies) and not isinstance(_see_copies("cuda"), GlooCopies)
