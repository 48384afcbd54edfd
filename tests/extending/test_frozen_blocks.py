"""A family of which only the final norm and the head are trained: blocks before them have a forward and no backward."""

from dataclasses import replace

import pytest
from layouts import all_layouts
from plugged import plugged_in

from benchmarks.dryrun import Subject
from dtlayout.costmodel.cache_keys import StageLayout, key_of
from dtlayout.costmodel.engine import find_engine, find_usual, known_engines
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.forward_only import find_differentiated, find_forward_only
from dtlayout.costmodel.fsdp2.memory import estimate_curve
from dtlayout.costmodel.scenario import Scenario, find_refusals
from dtlayout.dryrun.ranks import dry_run_ranks
from dtlayout.models.description import Description, describe_llama
from dtlayout.models.families import FAMILIES, Family, count_frozen_first, describe
from dtlayout.models.presets import find_preset
from dtlayout.pipelining.partition import StageSlice
from dtlayout.planner.peaks import Peaks
from dtlayout.planner.prediction import own_scenario
from dtlayout.planner.search import Search
from dtlayout.planner.space import Space
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts, ModelShape

FROZEN = replace(find_preset("llama-7b"), family="frozen-blocks")
RECOMPUTED = Layout(pp=2, dp_shard=4, recompute="full")


@pytest.fixture(autouse=True)
def registered():
    with plugged_in("frozen_blocks"):
        yield


def estimator(engine: str, model: ModelShape) -> Estimator:
    """The estimator of a model on eight GPUs."""
    return Estimator(
        Scenario(
            model=model,
            batch=Batch(global_batch=16, seq_len=2048),
            cluster=Cluster(gpu=find_gpu("a100-80g-sxm"), num_gpus=8, gpus_per_node=8),
            engine=find_engine(engine, "a100-80g-sxm"),
        )
    )


LAYOUTS = [
    Layout(dp_shard=2, tp=2, micro_batch=2, zero=2, recompute="keep-matmuls"),
    Layout(dp_shard=4, zero=1),
    Layout(dp_replicate=2, dp_shard=2, micro_batch=2, zero=3, recompute="selective"),
    Layout(pp=2, tp=4, micro_batch=2, schedule="gpipe", zero=2, recompute="selective", offload="activations"),
    Layout(pp=2, dp_shard=2, tp=2, schedule="v-min", virtual_stages=2, zero=2, sequence_parallel=False),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_dry_run_of_the_first_rank_holds_what_the_formula_says(layout):
    changes = ("num_layers", max(4, layout.num_stages)), ("vocab_size", 32_000), ("family", "frozen-blocks")
    subject = Subject("llama3.1-8b", "h100-80g-sxm", 4096, 6 * layout.micro_batch * layout.dp, layout, changes)
    scenario = own_scenario(subject.config, layout.world_size, find_gpu(subject.gpu))
    estimates, m = Estimator(scenario), layout.num_microbatches(scenario.batch)
    options = {"device_type": "cuda", "gpus_per_node": 8, "folds": False}
    (report,) = dry_run_ranks(subject.config, layout, Kernels(), [0], **options)
    assert estimates.memory(layout, Kernels())[0].total == pytest.approx(report.peak_bytes, rel=0.015)
    curve = estimate_curve(scenario, layout, Kernels(), estimates.stages(layout), 0, m)
    predicted = {str(action): fullest for action, fullest, _ in curve}
    held = {part.action: part.nbytes for part in report.curve if part.action in predicted}
    assert len(held) == m * (2 + layout.splits_backward) * layout.virtual_stages
    assert held == pytest.approx({action: predicted[action] for action in held}, rel=0.015)


@pytest.mark.parametrize("engine", known_engines())
def test_every_engine_is_predicted_to_do_and_keep_nothing_for_a_backward_of_the_first_stage(engine):
    kernels = find_usual(engine).kernels if engine != "dtlayout" else Kernels()
    frozen, trained = estimator(engine, FROZEN), estimator(engine, replace(FROZEN, family="llama"))
    first, last = frozen.work(RECOMPUTED, kernels)
    of_trained = trained.work(RECOMPUTED, kernels)
    assert first.recompute_s == first.weight_s == 0.0
    assert first.compute_s < 0.4 * of_trained[0].compute_s
    assert first.forward_s == pytest.approx(of_trained[0].forward_s)
    assert first.backward_s < 0.05 * first.forward_s  # a message at most
    assert last.recompute_s == of_trained[1].recompute_s > 0.0  # the gradient of its input is sent back

    layout = replace(RECOMPUTED, pp=1, dp_shard=8, recompute="none")
    held = [each.memory(layout, kernels)[0].activations for each in (frozen, trained)]
    assert held[0] < 0.15 * held[1]
    assert frozen.estimate(layout, kernels).step_time_s < 0.6 * trained.estimate(layout, kernels).step_time_s


def test_the_best_layout_found_is_the_best_of_all():
    """Bounds of a search must not count a backward that the first blocks lack; memory leaves some layouts out."""
    small = replace(FROZEN, hidden_size=2048, num_heads=16, num_kv_heads=4, ffn_size=4096, num_layers=6)
    gpu = replace(find_gpu("a100-80g-sxm"), memory_bytes=4_000_000_000)
    scenario = Scenario(
        model=small,
        batch=Batch(global_batch=8, seq_len=512),
        cluster=Cluster(gpu=gpu, num_gpus=4, gpus_per_node=4),
        engine=find_engine("dtlayout", gpu.name),
    )
    fixed = {"attention": "sdpa-flash", "norm": "fused", "zero": 2, "micro_batch": 1}
    space, estimates = Space(scenario, fixed), Estimator(scenario)
    legal = [case for case in all_layouts(space) if case[0].is_legal(small, scenario.batch)]
    found = [estimates.estimate(*case) for case in legal if not find_refusals(scenario, *case)]
    fitting = [each for each in found if each.fits]
    assert 0 < len(fitting) < len(found)
    (best,) = Search(space).run(top=1).ranked
    assert best.step_time_s == min(each.step_time_s for each in fitting)


def test_lower_bounds_count_no_backward_of_a_block():
    estimates = estimator("dtlayout", FROZEN)
    part = key_of(RECOMPUTED, StageLayout)
    blocks = estimates.layout_work(part, Kernels()).blocks
    first = estimates.work(RECOMPUTED, Kernels())[0]
    num_layers = len(estimates.stages(RECOMPUTED)[0].layers)
    assert num_layers * blocks.least_s[0] <= first.compute_s and blocks.least_s[1] == 0.0
    held = Peaks(estimates).block_bytes(part, Kernels())
    assert held.saved == held.kept == held.recomputed == 0.0 < held.logits


def test_blocks_behind_a_trained_embedding_have_a_backward(monkeypatch):
    def describe_with_embedding(model: ModelShape) -> Description:
        return replace(describe(replace(model, family="frozen-blocks")), embedding=describe_llama(model).embedding)

    monkeypatch.setitem(FAMILIES, "embedding-only", Family(name="embedding-only", describe=describe_with_embedding))
    model = replace(FROZEN, family="embedding-only")
    assert count_frozen_first(model) == 0
    assert estimator("dtlayout", model).work(RECOMPUTED, Kernels())[0].recompute_s > 0


def test_first_blocks_without_experts_may_be_the_frozen_ones(monkeypatch):
    def describe_first(model: ModelShape) -> Description:
        return describe_llama(model) if model.experts else describe(replace(model, family="frozen-blocks"))

    def describe_all(model: ModelShape) -> Description:
        frozen = describe(replace(model, family="frozen-blocks")).embedding
        return replace(describe_first(model), embedding=frozen)

    monkeypatch.setitem(FAMILIES, "frozen-first", Family(name="frozen-first", describe=describe_all))
    experts = Experts(number=8, per_token=2, ffn_size=1408, dense_layers=3)
    model = replace(FROZEN, family="frozen-first", experts=experts)
    assert count_frozen_first(model) == 3
    stage = StageSlice(range(5), embedding=True, head=False)
    assert find_forward_only(model, stage) == range(3) and find_differentiated(model, stage) == range(3, 5)
    later = StageSlice(range(2, 5), embedding=False, head=False)
    assert not find_forward_only(model, later) and find_differentiated(model, later) == range(2, 5)
