"""What an engine cannot run is neither recommended nor advised, and says why."""

from dataclasses import replace

import pytest
from outside import LATE_WEIGHTS, registered
from tiny import SHAPE

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.refusals import describe
from dtlayout.costmodel.engine import find_engine, find_usual
from dtlayout.costmodel.engine_rules import check_recompute
from dtlayout.costmodel.scenario import Scenario, find_refusals
from dtlayout.planner.explain import explain
from dtlayout.planner.search import Search
from dtlayout.planner.space import Space
from dtlayout.planner.verdicts import judge, parse_layout
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts
from dtlayout.spec.precision import Precision

MODEL = replace(SHAPE, hidden_size=1024, ffn_size=2048, num_layers=4, vocab_size=8192)


def scenario(engine: str = "dtlayout", gpu: str = "a100-80g-sxm") -> Scenario:
    cluster = Cluster(gpu=find_gpu(gpu), num_gpus=4, gpus_per_node=4)
    return Scenario(
        model=MODEL, batch=Batch(global_batch=8, seq_len=512), cluster=cluster, engine=find_engine(engine, gpu)
    )


@pytest.mark.parametrize(
    ("engine", "advice"),
    [
        ("megatron", "use selective"),
        ("aa-scaling", "use selective"),
        ("nanotron", "use none or full"),
        ("torchtitan", "use none or selective or every-N or full"),
    ],
)
def test_only_engines_that_tell_operations_apart_keep_one_of_them(engine, advice):
    assert not {"keep-attention", "keep-matmuls"} & set(Space(scenario(engine)).recompute)
    assert "keep-attention" in Space(scenario("prime-rl")).recompute
    layout = Layout(dp_shard=4, recompute="keep-attention")
    (problem,) = find_refusals(scenario(engine), layout, find_usual(engine).kernels)
    assert problem.startswith(f"layout.recompute=keep-attention is nothing that {engine} has; {advice}")
    (problem,) = describe(check_recompute(find_engine(engine, "a100-80g-sxm"), "keep-matmuls", MODEL))
    assert advice in problem
    advised = explain(scenario(engine), replace(layout, recompute="full"), Kernels()).changes
    assert not any("keep-" in override for change in advised for override in change.overrides)


def test_modules_that_a_model_lacks_take_selective_recomputation_from_the_search_and_no_other():
    told = scenario("megatron").engine.told({"recompute_modules": "mla_up_proj+mlp"})
    here, layout = replace(scenario("megatron"), engine=told), Layout(dp_shard=4, recompute="selective")
    assert "selective" in Space(scenario("megatron")).recompute and "full" in Space(here).recompute
    assert "selective" not in Space(here).recompute
    (problem,) = find_refusals(here, layout, find_usual("megatron").kernels)
    assert problem == (
        f"recompute_modules=mla_up_proj needs latent attention, and {MODEL.name} has none; leave mla_up_proj out of "
        "recompute_modules"
    )
    assert not find_refusals(here, replace(layout, recompute="full"), find_usual("megatron").kernels)


def test_a_mixture_of_experts_is_searched_for_engines_that_have_it():
    experts = Experts(number=8, per_token=2, ffn_size=512)
    engines, model = ("megatron", "dtlayout", "nanotron"), replace(MODEL, experts=experts)
    mixtures = {engine: replace(scenario(engine), model=model) for engine in engines}
    layout = Layout(dp_shard=4, ep=4)
    assert layout.is_legal(mixtures["megatron"].model, mixtures["megatron"].batch)
    assert find_refusals(mixtures["megatron"], layout, Kernels()) == []
    assert find_refusals(mixtures["dtlayout"], layout, Kernels()) == []
    (problem,) = find_refusals(mixtures["dtlayout"], Layout(dp_replicate=2, dp_shard=2, ep=4), Kernels())
    assert problem == (
        "ep=4 does not divide dp_shard * cp * tp=2, and copies of dp_replicate share no experts; use a divisor, or "
        "dp_replicate=1"
    )
    refused = "model.experts: nanotron has no mixture of experts; use a model without, or another engine"
    assert find_refusals(mixtures["nanotron"], Layout(dp_shard=4), Kernels()) == [refused]
    (problem,) = find_refusals(scenario("nanotron"), Layout(dp_shard=2, cp=2), Kernels())
    assert problem == "layout.cp=2 is nothing that nanotron has; use layout.cp=1"
    assert explain(mixtures["megatron"], layout, Kernels()).estimate.fits
    assert {degrees.ep for degrees in Space(mixtures["megatron"]).degrees} == {1, 2, 4}
    with pytest.raises(InvalidConfig, match=refused):
        Space(mixtures["nanotron"])


def test_a_search_that_is_held_to_backwards_in_two_parts_finds_what_the_trainer_runs():
    with registered(LATE_WEIGHTS):
        for name in ("torchtitan", "dtlayout"):
            ranked = Search(Space(scenario(name), fixed={"schedule": "late-weights", "pp": 2})).run().ranked
            assert ranked
            for found in ranked:
                assert not find_refusals(scenario(name), found.layout, found.kernels)
                assert not found.layout.overlaps_tp


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


@pytest.mark.parametrize(
    ("engine", "lacking", "problem"),
    [
        (
            "nanotron",
            {"dp_replicate": 2, "dp_shard": 2},
            "dp_replicate=2 beside dp_shard=2 is nothing that nanotron has; use dp_replicate=1 or dp_shard=1",
        ),
        (
            "automodel",
            {"dp_replicate": 4},
            "dp_replicate=4 without shards is nothing that automodel has; use dp_replicate=1",
        ),
        (
            "torchtitan",
            {"tp": 2, "dp_shard": 2, "sequence_parallel": False},
            "sequence_parallel=false is nothing that torchtitan has; use layout.sequence_parallel=true",
        ),
    ],
)
def test_no_program_is_recommended_what_its_file_cannot_say(engine, lacking, problem):
    here, layout = scenario(engine, "h100-80g-sxm"), Layout(**lacking)
    assert find_refusals(here, layout, find_usual(engine).kernels) == [f"layout.{problem}"]
    assert not find_refusals(scenario("megatron", "h100-80g-sxm"), layout, find_usual("megatron").kernels)
    assert not Search(Space(here, fixed=lacking)).run().ranked
    assert Search(Space(here)).run().ranked


def test_matmuls_below_bf16_are_predicted_of_others_where_the_gpu_has_them():
    here, layout = scenario("megatron", "h100-80g-sxm"), Layout(dp_shard=4)
    fp8, mxfp8 = (replace(here, precision=Precision(matmuls=name)) for name in ("fp8-tensorwise", "mxfp8"))
    assert not find_refusals(fp8, layout, Kernels())
    assert find_refusals(mxfp8, layout, Kernels()) == [
        "precision.matmuls=mxfp8 is no format that h100-80g-sxm multiplies in; "
        "use precision.matmuls=compute or fp8-tensorwise"
    ]
    own = replace(scenario("dtlayout", "h100-80g-sxm"), precision=fp8.precision)
    assert not find_refusals(own, layout, Kernels())
    (problem,) = find_refusals(own, Layout(tp=4, tp_overlap=True), Kernels())
    assert problem == (
        "precision.matmuls=fp8-tensorwise casts whole tensors, and layout.tp_overlap multiplies pieces; "
        "use tp_overlap=false"
    )
    overlapped = [each.layout.tp_overlap for each in Search(Space(own)).run().ranked]
    assert overlapped and not any(overlapped)
    alike = {"micro_batch": 1, "recompute": "none", "zero": 1}
    faster = [Search(Space(each, alike)).run().ranked[0] for each in (fp8, here)]
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
    kernels = replace(find_usual("torchtitan").kernels, attention="flash1")
    (problem,) = find_refusals(scenario("torchtitan", "h100-80g-sxm"), Layout(dp_shard=4), kernels)
    assert problem == (
        "kernels.attention=flash1 is nothing that torchtitan has; "
        "use kernels.attention=sdpa-flash or sdpa-cudnn or sdpa-efficient"
    )


def test_an_axis_is_searched_only_where_the_engine_has_it():
    for engine, axes in (
        ("fsdp1", set()),
        ("prime-rl", {"cp"}),
        ("dtlayout", {"tp", "pp", "cp"}),
        ("megatron", {"tp", "pp", "cp"}),
    ):
        degrees = Space(scenario(engine, "h100-80g-sxm")).degrees
        assert {axis for axis in ("tp", "pp", "cp") if any(getattr(each, axis) > 1 for each in degrees)} == axes
    assert not Search(Space(scenario("fsdp1", "h100-80g-sxm"), fixed={"tp": 2})).run().ranked


def test_megatron_is_recommended_no_stages_and_experts_that_it_refuses():
    here = replace(scenario("megatron", "h100-80g-sxm"), model=replace(MODEL, num_layers=13))
    for pp, is_refused in ((2, False), (3, False), (4, True), (5, False), (6, True)):
        problems = find_refusals(here, Layout(pp=pp), Kernels())
        assert bool(problems) == is_refused, pp
        assert all("make no" in problem and "even stages, as megatron asks" in problem for problem in problems)
    mixture = replace(here, model=replace(MODEL, experts=Experts(number=8, per_token=2, ffn_size=512)))
    (problem,) = find_refusals(mixture, Layout(tp=2, sequence_parallel=False), Kernels())
    assert "use sequence_parallel=true" in problem


def test_formats_and_stages_of_zero_that_an_engine_lacks_are_refused():
    fp8 = replace(scenario("prime-rl", "h100-80g-sxm"), precision=Precision(matmuls="fp8-tensorwise"))
    (problem,) = find_refusals(fp8, Layout(dp_shard=4), find_usual("prime-rl").kernels)
    assert problem == "precision.matmuls=fp8-tensorwise is nothing that prime-rl has; use compute"
    (problem,) = find_refusals(scenario("nanotron"), Layout(dp_shard=4, zero=3), Kernels())
    assert problem == "layout.zero=3 is nothing that nanotron has; use zero=1"


def test_tp_goes_without_sequence_parallelism_where_the_engine_has_none():
    space = Space(scenario("accelerate"), {"tp": 2})
    found = Search(space).run(top=3).ranked
    assert found and not any(each.layout.sequence_parallel for each in found)
    free = Search(Space(scenario("accelerate")))
    asked, kernels = parse_layout(free.space, {"tp": 2})
    assert asked == Layout(tp=2, dp_shard=2, sequence_parallel=False)
    assert judge(free, asked, kernels, found[0]).outcome in ("slower", "as fast", "faster")
    with_sp = judge(free, replace(asked, sequence_parallel=True), kernels, found[0])
    assert with_sp.outcome == "not legal" and "sequence_parallel" in " ".join(with_sp.problems)
    assert all(
        each.layout.sequence_parallel for each in Search(Space(scenario("torchtitan"), {"tp": 2})).run(top=3).ranked
    )
