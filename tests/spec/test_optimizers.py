"""Optimizers as values: what each keeps and moves, which values it refuses, and names that are taken."""

from dataclasses import dataclass, replace

import pytest

from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.engine import find_engine, known_engines
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.counting import count_parameters
from dtlayout.models.presets import find_preset
from dtlayout.spec import optimizers
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.optimizers import SGD, AdamW, Optimizer, find_optimizer, register_optimizer
from dtlayout.spec.precision import Precision


@pytest.mark.parametrize(
    ("optimizer", "state_bytes", "update_bytes"),
    [(AdamW(), 8, 28), (SGD(), 4, 32), (SGD(momentum=0.0), 0, 12), (SGD(weight_decay=0.1), 4, 44)],
    ids=["adamw", "sgd", "no momentum", "sgd that decays"],
)
def test_state_and_traffic_of_an_fp32_parameter_are_what_torch_keeps_and_moves(optimizer, state_bytes, update_bytes):
    assert (optimizer.state_bytes(4), optimizer.update_bytes) == (state_bytes, update_bytes)


@pytest.mark.parametrize("engine", known_engines())
def test_every_engine_keeps_the_state_of_the_scenarios_optimizer(engine):
    model, layout = find_preset("llama-7b"), Layout(dp_shard=8)
    scenario = Scenario(
        model=model,
        batch=Batch(global_batch=16, seq_len=2048),
        cluster=Cluster(gpu=find_gpu("a100-80g-sxm"), num_gpus=8, gpus_per_node=8),
        engine=find_engine(engine, "a100-80g-sxm"),
    )
    kept, seconds = [], []
    for optimizer in (AdamW(), SGD(), SGD(momentum=0.0)):
        estimate = Estimator(replace(scenario, optimizer=optimizer)).estimate(layout, Kernels())
        kept.append(estimate.memory[0].optimizer)
        seconds.append(estimate.time.optimizer)
    a_tensor = 4 * count_parameters(model) / 8
    counters = 4 * (9 * model.num_layers + 3) if scenario.engine.features.sharding == "fsdp2" else 0
    assert kept[0] - kept[1] == pytest.approx(a_tensor + counters)
    assert kept[1] - kept[2] == pytest.approx(a_tensor)
    assert seconds[2] < seconds[0] < seconds[1]


def test_state_is_in_the_parameters_format_unless_the_optimizer_says_another():
    @dataclass(frozen=True, kw_only=True)
    class Coarse(AdamW):
        @property
        def state(self):
            return {"exp_avg": None, "exp_avg_sq": "bfloat16"}

    assert [Coarse().state_bytes(size) for size in (8, 4, 2)] == [10, 6, 4]
    assert Scenario.__dataclass_fields__["optimizer"].default_factory() == AdamW()
    assert Precision().params == "float32"


def test_a_value_outside_its_range_is_refused_wherever_it_is_made():
    with pytest.raises(InvalidConfig) as caught:
        SGD(lr=0.0, momentum=1.5)
    assert caught.value.problems == [
        "optimizer.lr=0.0 must be above 0 and finite",
        "optimizer.momentum=1.5 must lie between 0 and 1",
    ]


def test_a_name_that_is_unknown_or_taken_is_refused(monkeypatch):
    monkeypatch.setattr(optimizers, "OPTIMIZERS", dict(optimizers.OPTIMIZERS))
    with pytest.raises(InvalidConfig, match=r"^optimizer.name='adam' is unknown; use one of adamw, sgd, muon$"):
        find_optimizer("adam")

    @dataclass(frozen=True, kw_only=True)
    class Adam(Optimizer):
        name: str = "adam"

    register_optimizer(Adam)
    assert (list(optimizers.OPTIMIZERS), find_optimizer("adam")) == (["adamw", "sgd", "muon", "adam"], Adam)
    with pytest.raises(InvalidConfig, match=r"^an optimizer called 'adam' is there already; register it under another"):
        register_optimizer(Adam)
