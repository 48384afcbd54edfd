"""What a traced model cannot train with is refused by name, before anything starts."""

from dataclasses import replace

import pytest
from toys import make_config

from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.compute import block_tp_s
from dtlayout.costmodel.engine import OWN_ENGINE, find_engine
from dtlayout.costmodel.engine_rules import find_training_lacks
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.traced import find_changed_sizes, read_trace
from dtlayout.planner.space import Space
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.device import Device
from dtlayout.spec.kernel_records import KernelRequest
from dtlayout.spec.kernels import OpenKernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import Precision
from dtlayout.tracing.trace import trace_config


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, ModelShape]:
    folder, found = tmp_path_factory.mktemp("traces"), {}
    for family in ("gpt_neox", "olmo2", "llama", "doge", "biogpt", "qwen3_moe"):
        config = {**make_config(family).to_dict(), "model_type": family}
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
        ("gpt_neox", Layout(cp=2), {}, "cp is for models that are described, and gpt_neox was traced"),
        ("gpt_neox", Layout(pp=2, schedule="zb-h1"), {}, "schedule=zb-h1 is for models that are described"),
        ("gpt_neox", Layout(offload="activations"), {}, "offload is for models that are described"),
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
    assert {each.tp for each in split.degrees} == {1, 2, 4} and {each.cp for each in split.degrees} == {1}
    scenario = replace(scenario, model=models["biogpt"])
    assert Space(scenario).sequence_parallel(2) == [False] and Space(scenario).tp_overlap(2) == [False]


def test_sizes_that_are_not_those_of_the_trace_are_said(models):
    model = models["gpt_neox"]
    assert find_changed_sizes(model) == find_changed_sizes(replace(model, name="other")) == []
    assert find_changed_sizes(replace(model, ffn_size=50)) == ["model.ffn_size is 50, and 48 in its trace"]
    with pytest.raises(InvalidConfig, match="num_layers=2 is not the number of its block_kinds, 3"):
        replace(model, num_layers=2)
