"""What an engine cannot run is neither recommended nor advised, and says why."""

from dataclasses import replace

import pytest
from outside import ZB_H1, registered
from tiny import SHAPE

from dtlayout.batch import Batch
from dtlayout.cluster import Cluster, find_gpu
from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.scenario import Scenario, find_refusals
from dtlayout.errors import InvalidConfig
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.model_shape import Experts
from dtlayout.planner.explain import explain
from dtlayout.planner.search import Search
from dtlayout.planner.space import Space
from dtlayout.precision import Precision

MODEL = replace(SHAPE, hidden_size=1024, ffn_size=2048, num_layers=4, vocab_size=8192)


def scenario(engine: str = "dtlayout", gpu: str = "a100-80g-sxm") -> Scenario:
    cluster = Cluster(gpu=find_gpu(gpu), num_gpus=4, gpus_per_node=4)
    return Scenario(
        model=MODEL, batch=Batch(global_batch=8, seq_len=512), cluster=cluster, engine=find_engine(engine, gpu)
    )


@pytest.mark.parametrize("engine", ["megatron", "aa-scaling", "nanotron"])
def test_only_engines_that_tell_operations_apart_keep_one_of_them(engine):
    assert not {"keep-attention", "keep-matmuls"} & set(Space(scenario(engine)).recompute)
    assert "keep-attention" in Space(scenario("torchtitan")).recompute
    layout = Layout(dp_shard=4, recompute="keep-attention")
    (problem,) = find_refusals(scenario(engine), layout, Kernels())
    assert problem.startswith(f"layout.recompute=keep-attention is nothing that {engine} has; use selective")
    (problem,) = find_engine(engine, "a100-80g-sxm").recompute_problems("keep-matmuls")
    assert "use selective" in problem
    advised = explain(scenario(engine), replace(layout, recompute="full"), Kernels()).changes
    assert not any("keep-" in override for change in advised for override in change.overrides)


def test_a_mixture_of_experts_is_predicted_for_engines_that_have_it_and_not_searched():
    experts = Experts(number=8, per_token=2, ffn_size=512)
    mixtures = {e: replace(scenario(e), model=replace(MODEL, experts=experts)) for e in ("megatron", "dtlayout")}
    layout = Layout(dp_shard=4, ep=4)
    assert layout.is_legal(mixtures["megatron"].model, mixtures["megatron"].batch)
    assert find_refusals(mixtures["megatron"], layout, Kernels()) == []
    (problem,) = find_refusals(mixtures["dtlayout"], layout, Kernels())
    assert problem == "model.experts: dtlayout has no mixture of experts; use a model without, or another engine"
    assert explain(mixtures["megatron"], layout, Kernels()).estimate.fits
    with pytest.raises(InvalidConfig, match="model tiny is a mixture of experts, whose layouts are not searched yet"):
        Space(mixtures["megatron"])


def test_a_schedule_that_the_trainer_cannot_run_is_predicted_for_other_engines_alone():
    with registered(ZB_H1):
        assert Search(Space(scenario("torchtitan"), fixed={"schedule": "zb-h1"})).run().ranked
        assert not Search(Space(scenario(), fixed={"schedule": "zb-h1"})).run().ranked
        layout = Layout(pp=2, dp_shard=2, schedule="zb-h1")
        assert not find_refusals(scenario("torchtitan"), layout, Kernels())
        (problem,) = find_refusals(scenario(), layout, Kernels())
    assert problem == "schedule=zb-h1 splits backwards, which can be predicted, not trained; use schedule=1f1b"


def test_no_whole_stage_is_compiled_where_tp_splits_the_embedding():
    ranked = Search(Space(scenario(), fixed={"compile": "model"})).run().ranked
    assert ranked
    assert {(found.layout.tp, found.kernels.compile) for found in ranked} == {(1, "model")}


def test_no_change_is_advised_that_the_trainer_refuses():
    here = scenario(gpu="cpu")
    layout = Layout(tp=2, dp_shard=2, recompute="keep-matmuls")
    (problem,) = find_refusals(here, layout, Kernels(compile="blocks"))
    assert "use layout.recompute=selective or kernels.attention=blockwise" in problem
    for kernels in (Kernels(), Kernels(compile="model")):
        for change in explain(here, layout, kernels).changes:
            assert not find_refusals(here, change.estimate.layout, change.estimate.kernels)


def test_no_engine_is_asked_for_what_its_code_lacks():
    here = scenario("megatron", "h100-80g-sxm")
    (problem,) = find_refusals(here, Layout(pp=2, dp_shard=2, schedule="gpipe"), Kernels())
    assert problem == "layout.schedule=gpipe is nothing that megatron has; use 1f1b or interleaved-1f1b"
    (problem,) = find_refusals(here, Layout(pp=2, dp_shard=2, zero=3), Kernels())
    assert problem == "layout.zero=3 in a pipeline is nothing that megatron has; use zero=2 or less"
    assert not find_refusals(here, Layout(dp_shard=4, zero=3), Kernels())
    ranked = Search(Space(here, fixed={"pp": 2})).run().ranked
    assert {each.layout.zero for each in ranked} <= {1, 2}
    assert {each.layout.schedule for each in ranked} <= {"1f1b", "interleaved-1f1b"}
    assert not Search(Space(here, fixed={"pp": 2, "zero": 3})).run().ranked


def test_matmuls_below_bf16_are_predicted_of_others_where_the_gpu_has_them():
    here, layout = scenario("megatron", "h100-80g-sxm"), Layout(dp_shard=4)
    fp8, mxfp8 = (replace(here, precision=Precision(matmuls=name)) for name in ("fp8-tensorwise", "mxfp8"))
    assert not find_refusals(fp8, layout, Kernels())
    assert find_refusals(mxfp8, layout, Kernels()) == [
        "precision.matmuls=mxfp8 is no format that h100-80g-sxm multiplies in"
    ]
    own = replace(scenario("dtlayout", "h100-80g-sxm"), precision=fp8.precision)
    (problem,) = find_refusals(own, layout, Kernels())
    assert problem == "precision.matmuls=fp8-tensorwise can be predicted, not trained; use precision.matmuls=compute"
    faster = Search(Space(fp8)).run().ranked[0], Search(Space(here)).run().ranked[0]
    assert faster[0].step_time_s < faster[1].step_time_s
    assert faster[0].peak_bytes < faster[1].peak_bytes


def test_a_config_below_bf16_is_refused_before_it_starts():
    with pytest.raises(InvalidConfig, match=r"precision.matmuls='fp8' is unknown; use one of"):
        Precision(matmuls="fp8")
    with pytest.raises(InvalidConfig, match=r"is cast from bfloat16, and precision.compute is float32"):
        Precision(matmuls="mxfp8", compute="float32")


def test_an_engines_own_kernel_is_no_reason_against_it_and_ours_is():
    here = scenario("fsdp1", "h100-80g-sxm")
    ranked = Search(Space(here, fixed={"attention": "flash1"})).run().ranked
    assert ranked and {each.kernels.attention for each in ranked} == {"flash1"}
    (problem,) = find_refusals(scenario("torchtitan", "h100-80g-sxm"), Layout(dp_shard=4), Kernels(attention="flash1"))
    assert problem.startswith("kernels.attention=flash1")
