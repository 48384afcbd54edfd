"""A run is one record, which JSON gives back whole, and what is not one of this version is refused by key."""

import json

import pytest
from tiny import SHAPE

from dtlayout.base.errors import DtlayoutError
from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.memory import MemoryEstimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.presets import find_preset
from dtlayout.records.run import Performance, Run
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, gpu_named
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import Precision

CLUSTER = {"gpu": "cpu", "measured": {}, "num_gpus": 1, "gpus_per_node": 1}


def make_run(gpu: str = "a100-80g-sxm", model=SHAPE, **changes) -> Run:
    scenario = Scenario(
        model=model, batch=Batch(global_batch=8, seq_len=100), precision=Precision(compute="float32"),
        cluster=Cluster(gpu=gpu_named(gpu), num_gpus=4, gpus_per_node=2), engine=find_engine("dtlayout", gpu),
        document_mask=True,
    )  # fmt: skip
    values = {
        "table": "sweep", "row": "7", "scenario": scenario, "kernels": Kernels(norm="eager"), "outcome": "dry",
        "layout": Layout(pp=2, dp_shard=2, stage_layers=(3, 1)),
        "measured": Performance(
            peak_memory_bytes=(None, 36), memory=(None, MemoryEstimate(*(float(i) for i in range(1, 9))))
        ),
    }  # fmt: skip
    return Run(**values | changes)


@pytest.mark.parametrize("gpu", ["a100-80g-sxm", "cpu", "NVIDIA GeForce GTX 970", ""])
@pytest.mark.parametrize("model", [SHAPE, find_preset("llama3.1-8b")], ids=["plain", "with scaled rope"])
def test_json_gives_a_run_back(gpu, model):
    run = make_run(gpu, model)
    assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_predicted_and_measured_have_the_same_words():
    measured = make_run().to_dict()["measured"]
    assert list(measured) == [
        "step_time_s", "step_time_spread_s", "tokens_per_s", "mfu", "peak_memory_bytes", "peak_reserved_bytes",
        "time", "memory", "expert_imbalance",
    ]  # fmt: skip
    assert measured["memory"][1]["parameters"] == 1.0


def test_a_gpu_of_which_only_the_name_is_known_is_none_to_predict_for():
    assert not make_run("NVIDIA GeForce GTX 970").scenario.cluster.gpu.is_known
    assert make_run("cpu").scenario.cluster.gpu.is_known


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": 2}, "run.format=2, and this version of dtlayout reads 1; use the version that wrote it"),
        ({"measurd": {}}, "run.measurd is unknown; did you mean run.measured?"),
        ({"outcome": "fine"}, "run.outcome='fine' is unknown; use one of"),
        ({"layout": {"tp": "two"}}, "run.layout.tp='two' must be a whole number"),
        ({"layout": {"tp": 0}}, "layout.tp=0 must be at least 1"),
        ({"measured": {"memory": [{"parameters": 1.0}]}}, "gradients is missing"),
        ({"scenario": {}}, "run.scenario is unknown"),
        ({"cluster": CLUSTER | {"measured": {"memory_bytes": "all"}}}, "measured.memory_bytes='all' must be a whole"),
        ({"cluster": CLUSTER | {"measured": {"achieved": {"a": "b"}}}}, "measured.achieved.a='b' must be a number"),
        ({"engine": "steam"}, "engine 'steam' is unknown"),
        ({"cluster": CLUSTER | {"measured": {"speed": 1}}}, "run.cluster.measured.speed is unknown"),
    ],
)
def test_what_is_no_run_of_this_version_is_refused_by_key(change, problem):
    with pytest.raises(DtlayoutError) as caught:
        Run.from_dict(make_run().to_dict() | change)
    assert problem in str(caught.value)


def test_a_key_that_is_missing_takes_its_default_and_no_run_at_all_is_refused():
    document = make_run().to_dict()
    del document["layout"]["zero"]
    assert Run.from_dict(document).layout.zero == 1
    with pytest.raises(DtlayoutError, match="format=None"):
        Run.from_dict([])
