"""Balanced stages are nearly as good, by time or by memory, as the best of all ways to cut the model."""

from dataclasses import replace
from itertools import product

import pytest
from tiny import SHAPE

from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.scenario import Scenario
from dtlayout.planner.explain import explain
from dtlayout.planner.search import Search
from dtlayout.planner.space import Space
from dtlayout.planner.stage_balance import balance_memory, balance_time
from dtlayout.planner.suggestions import list_remarks, remark_on_split
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

MODEL = replace(
    SHAPE, hidden_size=2048, num_heads=16, num_kv_heads=8, ffn_size=5632, num_layers=10, vocab_size=128_000
)  # fmt: skip
LAYOUTS = [
    Layout(pp=2, dp_shard=4), Layout(pp=4, dp_shard=2), Layout(pp=4, tp=2, schedule="gpipe"),
    Layout(pp=2, dp_shard=4, schedule="interleaved-1f1b", virtual_stages=2), Layout(pp=4, dp_shard=2, recompute="full"),
    Layout(pp=2, dp_shard=4, schedule="zb-v", virtual_stages=2, zero=3),
]  # fmt: skip


def estimator_of(engine):
    gpu = "h100-80g-sxm"
    cluster = Cluster(gpu=find_gpu(gpu), num_gpus=8, gpus_per_node=8)
    batch = Batch(global_batch=64, seq_len=2048)
    return Estimator(Scenario(model=MODEL, batch=batch, cluster=cluster, engine=find_engine(engine, gpu)))


def all_splits(layout):
    s = layout.num_stages
    for counts in product(range(MODEL.num_layers + 1), repeat=s):
        if sum(counts) == MODEL.num_layers and min(counts[1:-1], default=1) > 0:
            yield replace(layout, stage_layers=counts)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_split_by_memory_is_nearly_the_best_of_all(layout):
    estimator, kernels = estimator_of("dtlayout"), Kernels()

    def need(cut):
        return max(rank.needed for rank in estimator.memory(cut, kernels))

    found = balance_memory(estimator, layout, kernels)
    assert found.problems(MODEL, estimator.scenario.batch) == []
    best = min(map(need, all_splits(layout)))
    assert best <= need(found) <= min(1.05 * best, need(layout))  # two blocks that have to move at once stay


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_split_by_time_is_nearly_the_best_of_all(layout):
    estimator, kernels = estimator_of("dtlayout"), Kernels()
    found = balance_time(estimator, layout, kernels)
    assert found.problems(MODEL, estimator.scenario.batch) == []
    best = min(estimator.estimate(cut, kernels).step_time_s for cut in all_splits(layout))
    now, then = (estimator.estimate(each, kernels).step_time_s for each in (layout, found))
    assert best <= then <= min(1.03 * best, now)


def test_explain_names_a_split_that_is_faster():
    scenario = estimator_of("megatron").scenario
    even = replace(LAYOUTS[1], stage_layers=(3, 3, 2, 2))
    (change,) = [each for each in explain(scenario, even, Kernels()).changes if each.knob == "stage_layers"]
    assert change.estimate.step_time_s < Estimator(scenario).estimate(even, Kernels()).step_time_s
    cut = ",".join(map(str, change.estimate.layout.stage_layers))
    assert change.overrides == (f"--layout.stage_layers=[{cut}]",)


def test_recommend_says_what_another_split_would_be_worth():
    scenario, fixed = estimator_of("megatron").scenario, {"pp": 4, "virtual_stages": 1, "tp": 1, "cp": 1}
    search = Search(Space(scenario, fixed))
    (best,) = search.run(top=1).ranked
    better = search.estimator.estimate(balance_time(search.estimator, best.layout, best.kernels), best.kernels)
    gain = 1 - better.step_time_s / best.step_time_s
    assert gain > 0.01
    split = f"with stage_layers={list(better.layout.stage_layers)} it would be {gain:.1%} faster, "
    assert split in remark_on_split(search, best) and split in "".join(list_remarks(search, [best]))
    held = Search(Space(scenario, {**fixed, "stage_layers": better.layout.stage_layers}))
    assert remark_on_split(held, held.run(top=1).ranked[0]) == ""


def test_where_nothing_fits_a_split_by_memory_may():
    roomy, fixed = estimator_of("dtlayout").scenario, {"pp": 4, "virtual_stages": 1, "tp": 1, "cp": 1}
    missed = min(Search(Space(roomy, fixed)).run(top=50).ranked, key=lambda e: e.needed_bytes)
    estimator = Estimator(roomy)
    balanced = estimator.estimate(balance_memory(estimator, missed.layout, missed.kernels), missed.kernels)
    assert balanced.needed_bytes < 0.98 * missed.needed_bytes
    between = int((balanced.needed_bytes + missed.needed_bytes) / 2)
    tight = Search(Space(roomy, fixed), between / roomy.capacity_bytes)
    said = remark_on_split(tight, missed)
    assert f"with stage_layers={list(balanced.layout.stage_layers)} it would fit, " in said


def test_a_large_head_gets_a_rank_of_few_blocks():
    estimator = estimator_of("megatron")
    even = replace(Layout(pp=4, dp_shard=2), stage_layers=(3, 3, 2, 2))
    first, *_, last = balance_time(estimator, even, Kernels()).stage_layers
    assert last < 2 < first
