"""Optimizers as values: what each keeps and moves, which values it refuses, and names that are taken."""

from dataclasses import dataclass, replace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.refusals import describe
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
from dtlayout.spec.newton_schulz import SCALES, iteration_flops, plan_buckets
from dtlayout.spec.optimizers import (
    SGD,
    AdamW,
    Muon,
    Optimizer,
    check_state_format,
    find_optimizer,
    register_optimizer,
)
from dtlayout.spec.precision import Precision
from dtlayout.spec.roles import ROLES


@pytest.mark.parametrize(
    ("optimizer", "state_bytes", "update_bytes"),
    [
        (AdamW(), 8, 28),
        (SGD(), 4, 32),
        (SGD(momentum=0.0), 0, 12),
        (SGD(weight_decay=0.1), 4, 44),
        (AdamW(state_format="bfloat16"), 4, 20),
        (AdamW(state_format="float32"), 8, 28),
        (AdamW(state_format="int8"), 2 + 8 / 256, 12 + 4 + 16 / 256),
        (SGD(state_format="bfloat16"), 2, 22),
        (SGD(state_format="bfloat16", momentum=0.0), 0, 12),
        (Muon(), 4, 56),
        (Muon(nesterov=False, weight_decay=0.0), 4, 36),
    ],
    ids=[
        "adamw",
        "sgd",
        "no momentum",
        "sgd that decays",
        "adamw in bf16",
        "adamw in fp32",
        "adamw in int8",
        "sgd in bf16",
        "no momentum in bf16",
        "muon",
        "muon without",
    ],
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
    for optimizer in (AdamW(), SGD(), SGD(momentum=0.0), AdamW(state_format="bfloat16")):
        estimate = Estimator(replace(scenario, optimizer=optimizer)).estimate(layout, Kernels())
        kept.append(estimate.memory[0].optimizer)
        seconds.append(estimate.time.optimizer)
    a_tensor = 4 * count_parameters(model) / 8
    counters = 4 * (9 * model.num_layers + 3) if scenario.engine.features.sharding == "fsdp2" else 0
    assert kept[0] - kept[1] == pytest.approx(a_tensor + counters)
    assert kept[1] - kept[2] == pytest.approx(a_tensor)
    assert kept[0] - kept[3] == pytest.approx(a_tensor)  # half of two
    assert seconds[2] < seconds[3] < seconds[0] < seconds[1]


def test_state_is_in_the_parameters_format_unless_the_optimizer_says_another():
    @dataclass(frozen=True, kw_only=True)
    class Coarse(AdamW):
        @property
        def state(self):
            return {"exp_avg": None, "exp_avg_sq": "bfloat16"}

    assert [Coarse().state_bytes(size) for size in (8, 4, 2)] == [10, 6, 4]
    assert Scenario.__dataclass_fields__["optimizer"].default_factory() == AdamW()
    assert Precision().params == "float32"


def test_a_format_of_state_that_is_unknown_or_in_which_it_never_falls_is_refused():
    with pytest.raises(InvalidConfig, match=r"optimizer.state_format='float16' is unknown; use one of \['', 'bfloat16"):
        AdamW(state_format="float16")
    with pytest.raises(InvalidConfig) as caught:
        AdamW(state_format="bfloat16", beta1=0.999, beta2=0.998)
    assert caught.value.problems[1] == (
        "optimizer.beta2=0.998 takes 0.20% off at a step, which bfloat16 can round to nothing, so that the state never "
        "falls; use beta2 up to 0.996, or leave out optimizer.state_format"
    )
    assert len(caught.value.problems) == 2
    with pytest.raises(InvalidConfig, match=r"optimizer\.momentum=0\.999 takes"):
        SGD(state_format="bfloat16", momentum=0.999)
    AdamW(beta2=0.999), AdamW(state_format="bfloat16", beta2=0.996), SGD(state_format="bfloat16", momentum=1.0)


def test_moments_in_int8_are_predicted_beside_those_of_the_embedding_in_fp32_and_not_trained():
    coarse = AdamW(state_format="int8", beta2=0.999)
    taken = {role: coarse.of_role(role).state_bytes(2) for role in ROLES}
    assert taken == {role: 8 if role == "embedding" else 2 + 8 / 256 for role in ROLES}
    assert [each.state_format for each in coarse.parts] == ["int8", "float32"]
    assert AdamW().parts == (AdamW(),) and AdamW().of_role("embedding") == AdamW()
    assert describe(check_state_format(Muon(rest=coarse))) == [
        "optimizer.state_format=int8 can be predicted, not trained; use state_format=bfloat16, or leave it out"
    ]
    assert not check_state_format(AdamW(state_format="bfloat16", beta2=0.9)) and not check_state_format(SGD())


def test_muon_takes_matrices_and_stacks_and_is_refused_where_the_device_has_no_state():
    muon = Muon(rest=SGD())
    taken = {role: muon.of_role(role).name for role in ROLES}
    assert taken == {role: "muon" if role in ("matrix", "expert") else "sgd" for role in ROLES}
    assert (muon.decay_of("expert"), muon.decay_of("matrix")) == (0.1, 0.1)
    fine = (Layout(dp_replicate=2, dp_shard=2, cp=2, tp=2), Layout(dp_shard=4, ep=2), Layout(offload="activations"))
    assert not [problem for layout in fine for problem in muon.layout_problems(layout)]
    for offload in ("optimizer", "both"):
        assert muon.layout_problems(Layout(offload=offload)) == [
            "optimizer.name=muon iterates matrices on the device, which has no state with layout.offload="
            f"{offload}; use layout.offload=none or activations"
        ]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=40), st.integers(1, 6), st.integers(1, 200))
def test_buckets_hold_each_matrix_once_are_bounded_and_evenly_shared(shapes, num_ranks, most):
    with mock.patch("dtlayout.spec.newton_schulz.BUCKET_ELEMENTS", most):
        buckets = plan_buckets(shapes, num_ranks)
    assert sorted(place for each in buckets for owned in each.owned for place in owned) == list(range(len(shapes)))
    for each in buckets:
        held = [place for owned in each.owned for place in owned]
        elements = sum(shapes[place][0] * shapes[place][1] for place in held)
        assert len(held) <= num_ranks or elements <= num_ranks * most
        loads = [sum(iteration_flops(shapes[place], 5) for place in owned) for owned in each.owned]
        assert max(loads) - min(loads) <= max(iteration_flops(shapes[place], 5) for place in held)


def test_flops_and_scales_are_the_published_ones():
    assert iteration_flops((4096, 11008), 5) == 5 * (4 * 4096**2 * 11008 + 2 * 4096**3)
    assert iteration_flops((11008, 4096), 1) == iteration_flops((4096, 11008), 1)
    assert SCALES["match_rms_adamw"](100, 25) == SCALES["match_rms_adamw"](25, 100) == pytest.approx(2.0)
    assert (SCALES["original"](100, 25), SCALES["original"](25, 100)) == (2.0, 1.0)


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


def test_given_keys_make_the_same_optimizer_again_and_problems_name_the_nested_table():
    of_two = Muon(lr=0.01, rest=SGD(lr=0.1))
    for optimizer in (AdamW(), AdamW(beta2=0.9, state_format="bfloat16"), of_two, Muon(rest=AdamW(beta1=0.8))):
        table: dict = {"name": optimizer.name}
        for key, value in optimizer.given.items():
            nested, _, last = key.rpartition(".")
            (table.setdefault(nested, {}) if nested else table)[last] = value
        assert Optimizer.parse(table, "optimizer") == optimizer
    assert of_two.given == {"lr": 0.01, "rest.name": "sgd", "rest.lr": 0.1}
    for table, said in (
        ({"rest": {"state_format": "bfloat16", "beta2": 0.999}}, "optimizer.rest.beta2=0.999 takes"),
        ({"state_format": "bfloat16"}, "optimizer.state_format is a key of optimizer.rest, the optimizer of the other"),
    ):
        with pytest.raises(InvalidConfig, match=f"^{said}"):
            Optimizer.parse({"name": "muon", **table}, "optimizer")
