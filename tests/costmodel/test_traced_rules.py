"""What a traced model cannot train with is refused by name, before anything starts."""

from dataclasses import replace

import pytest
from torch import nn
from toys import make_config

from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.compute import block_tp_s
from dtlayout.costmodel.engine import OWN_ENGINE, find_engine
from dtlayout.costmodel.engine_rules import find_training_lacks
from dtlayout.costmodel.estimate import estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.operations import Linear
from dtlayout.models.traced import find_changed_sizes, read_trace
from dtlayout.planner.space import Space
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.device import Device
from dtlayout.spec.kernel_records import KernelRequest
from dtlayout.spec.kernels import Kernels, OpenKernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import Precision
from dtlayout.tracing.limits import find_whole_backward
from dtlayout.tracing.trace import trace_config

MORE = {
    "phi3": {
        "sliding_window": None, "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 32,
        },
    },
}  # fmt: skip
"""Family → keys beside those of its toy."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, ModelShape]:
    folder, found = tmp_path_factory.mktemp("traces"), {}
    for family in ("gpt_neox", "olmo2", "llama", "biogpt", "qwen3_moe", "gemma2", "phi3", "doge"):
        config = {**make_config(family, **MORE.get(family, {})).to_dict(), "model_type": family}
        file = folder / f"{family}.json"
        file.write_text(trace_config(config, family).dumps())
        found[family] = read_trace(str(file)).shape
    return found


def find_lacks(model: ModelShape, layout: Layout, engine: str = OWN_ENGINE, **precision: str) -> list[str]:
    return find_training_lacks(find_engine(engine, "cpu"), layout, model, Precision(**precision))


@pytest.mark.parametrize(
    ("family", "layout", "precision", "reason"),
    [
        ("gpt_neox", Layout(tp=2), {}, ""),
        ("gpt_neox", Layout(tp=2, pp=2, sequence_parallel=True, recompute="full"), {}, ""),
        ("olmo2", Layout(tp=2), {}, ""),
        ("doge", Layout(tp=2), {}, "layout.tp=2: input_residual belongs to no norm"),
        ("biogpt", Layout(tp=2, sequence_parallel=False), {}, ""),
        ("biogpt", Layout(tp=2, sequence_parallel=True), {}, "layout.sequence_parallel: fc1 lies in its block"),
        ("qwen3_moe", Layout(), {}, "a mixture of experts is traced for predictions alone"),
        ("gpt_neox", Layout(cp=2), {}, ""),
        ("gpt_neox", Layout(cp=2, cp_method="all-to-all", tp=2), {}, ""),
        ("biogpt", Layout(cp=2), {}, "layout.cp=2: its attention is no function that transformers looks up by name"),
        ("doge", Layout(cp=2), {}, "layout.cp=2: its blocks make a mask of their own"),
        ("phi3", Layout(cp=2), {}, "layout.cp=2: its rotary frequencies depend on the longest position"),
        ("gemma2", Layout(cp=2, cp_method="all-to-all"), {}, ""),
        ("gemma2", Layout(cp=2), {}, "layout.cp_method=ring: its attention has a window and a softcap, which"),
        ("gpt_neox", Layout(pp=2, schedule="zb-h1"), {}, ""),
        ("gpt_neox", Layout(offload="activations"), {}, ""),
        ("gpt_neox", Layout(), {"matmuls": "fp8-rowwise"}, "precision.matmuls is for models that are described"),
        ("gpt_neox", Layout(), {"fake_quant": "int8"}, "precision.fake_quant is for models that are described"),
    ],
)  # fmt: skip
def test_a_layout_is_trained_or_refused_with_the_reason(models, family, layout, precision, reason):
    lacks = find_lacks(models[family], layout, **precision)
    assert any(reason in each for each in lacks) if reason else lacks == []


def test_a_norm_over_all_heads_costs_messages_where_tp_splits_them(models):
    def find_messages_s(family: str, tp: int) -> float:
        cluster = Cluster(gpu=find_gpu("h100-80g-sxm"), num_gpus=8, gpus_per_node=8)
        engine = find_engine(OWN_ENGINE, cluster.gpu.name)
        scenario = Scenario(
            model=models[family], batch=Batch(global_batch=8, seq_len=64), cluster=cluster, engine=engine
        )
        return sum(block_tp_s(scenario, Layout(tp=tp)))

    # Without: two all-reduces forward and two backward. With: those of queries' and of keys' norms, as often again.
    assert find_messages_s("olmo2", 2) == pytest.approx(2 * find_messages_s("llama", 2), rel=0.01)
    assert find_messages_s("olmo2", 1) == 0


def test_an_adapter_is_refused_and_another_program_is_not_asked(models):
    adapted = replace(models["gpt_neox"], adapter=Adapter(rank=4))
    assert any("adapter is for models that are described" in each for each in find_lacks(adapted, Layout()))
    assert find_lacks(models["doge"], Layout(tp=2), "megatron") == []


def test_kernels_that_a_traced_block_does_not_call_are_not_chosen(models):
    request = KernelRequest.of(Device(type="cpu"), models["gpt_neox"], "float32", Layout(), document_mask=False)
    chosen = OpenKernels().resolve(request)
    assert not chosen.reasons.keys() & {"norm", "rope", "swiglu"} and "attention" in chosen.reasons


@pytest.mark.parametrize(("engine", "degrees"), [(OWN_ENGINE, {1}), ("megatron", {1, 2, 4})])
def test_a_search_looks_at_no_layout_that_the_trainer_refuses(models, engine, degrees):
    cluster = Cluster(gpu=find_gpu("h100-80g-sxm"), num_gpus=4, gpus_per_node=4)
    scenario = Scenario(
        model=models["doge"], batch=Batch(global_batch=8, seq_len=64), cluster=cluster,
        engine=find_engine(engine, cluster.gpu.name),
    )  # fmt: skip
    assert {each.tp for each in Space(scenario).degrees} == degrees
    if engine != OWN_ENGINE:
        return
    split = Space(replace(scenario, model=models["gpt_neox"]))
    assert {each.tp for each in split.degrees} == {1, 2, 4}
    scenario = replace(scenario, model=models["biogpt"])
    assert Space(scenario).sequence_parallel(2) == [False] and Space(scenario).tp_overlap(2) == [False]


@pytest.mark.parametrize(
    ("family", "methods"),
    [("gpt_neox", ["ring", "gather", "all-to-all"]), ("gemma2", ["all-to-all"]), ("biogpt", [])],
)
def test_a_search_looks_at_the_methods_of_cp_that_a_model_allows(models, family, methods):
    cluster = Cluster(gpu=find_gpu("h100-80g-sxm"), num_gpus=4, gpus_per_node=4)
    space = Space(Scenario(
        model=models[family], batch=Batch(global_batch=8, seq_len=64), cluster=cluster,
        engine=find_engine(OWN_ENGINE, cluster.gpu.name),
    ))  # fmt: skip
    assert {each.cp for each in space.degrees} == ({1, 2, 4} if methods else {1})
    assert not methods or space.cp_methods(2) == methods


def test_a_layer_of_a_class_of_its_own_keeps_its_backward_whole():
    own = type("Own", (nn.Linear,), {})
    block = nn.ModuleDict({"a": nn.Linear(8, 8), "b": own(8, 8)})
    linears = [Linear(name, "hidden", 8, 8, style="colwise") for name in block]
    assert find_whole_backward(block, linears) == "b is a Own, whose backward is one piece"
    assert find_whole_backward(block, [linears[0], replace(linears[1], part_of="b", rows=8)]) == ""


def test_sizes_that_are_not_those_of_the_trace_are_said(models):
    model = models["gpt_neox"]
    assert find_changed_sizes(model) == find_changed_sizes(replace(model, name="other")) == []
    assert find_changed_sizes(replace(model, ffn_size=50)) == ["model.ffn_size is 50, and 48 in its trace"]
    with pytest.raises(InvalidConfig, match="num_layers=2 is not the number of its block_kinds, 3"):
        replace(model, num_layers=2)


def test_a_model_with_two_kinds_of_blocks_has_a_peak(models):
    cluster = Cluster(gpu=find_gpu("h100-80g-sxm"), num_gpus=2, gpus_per_node=2)
    scenario = Scenario(
        model=models["gemma2"], batch=Batch(global_batch=8, seq_len=64), cluster=cluster,
        engine=find_engine(OWN_ENGINE, cluster.gpu.name),
    )  # fmt: skip
    assert len(scenario.kinds) == 2
    peaks = [
        estimate(scenario, Layout(dp_shard=2, recompute=each), Kernels()).memory.peak_bytes for each in ("none", "full")
    ]
    assert peaks[0] > peaks[1] > 0
