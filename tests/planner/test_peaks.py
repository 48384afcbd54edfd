"""Lower bounds of memory, from parts that layouts share, are never above the cost model's need."""

from dataclasses import replace
from itertools import islice
from random import Random

import pytest
from layouts import all_layouts
from tiny import SHAPE

from dtlayout.costmodel.cache_keys import PipelineLayout, StageLayout, StateLayout, key_of
from dtlayout.costmodel.engine import find_engine, known_engines
from dtlayout.costmodel.engine_rules import find_model_lacks
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.scenario import Scenario, find_scenario_lacks
from dtlayout.planner.peaks import Peaks
from dtlayout.planner.space import Space
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.model_shape import Experts, ModelShape
from dtlayout.spec.optimizers import SGD, AdamW, Muon
from dtlayout.spec.precision import Precision

FEWER = {"recompute": ["every-4", "every-8"], "micro_batch": [8, 16], "attention": ["sdpa-math"]}
DEEP = ModelShape(
    name="deep", hidden_size=2048, num_layers=13, num_heads=16, num_kv_heads=8, ffn_size=4096, vocab_size=32_000
)  # fmt: skip
ADAPTED = replace(DEEP, adapter=Adapter(rank=8))
EXPERTS = replace(DEEP, experts=Experts(number=8, per_token=2, ffn_size=512, dense_layers=2))


@pytest.mark.parametrize("engine", known_engines())
@pytest.mark.parametrize(
    ("model", "optimizer", "matmuls"),
    [
        *((*each, "compute") for each in ((SHAPE, AdamW()), (DEEP, AdamW()), (DEEP, SGD()), (DEEP, Muon()))),
        (EXPERTS, AdamW(), "compute"),
        (DEEP, AdamW(), "fp8-tensorwise"),
        (ADAPTED, AdamW(), "compute"),
        (DEEP, AdamW(state_format="int8"), "compute"),
    ],
    ids=["tiny", "deep", "deep sgd", "deep muon", "experts", "deep fp8", "adapter", "deep int8"],
)
def test_held_and_state_add_up_to_no_more_than_the_fullest_rank_needs(engine, model, optimizer, matmuls):
    scenario = Scenario(
        model=model,
        batch=Batch(global_batch=16, seq_len=512),
        cluster=Cluster(gpu=find_gpu("h100-80g-sxm"), num_gpus=16, gpus_per_node=4),
        engine=find_engine(engine, "h100-80g-sxm"),
        optimizer=optimizer,
        precision=Precision(matmuls=matmuls),
    )
    if matmuls not in ("compute", *scenario.engine.features.matmuls):
        pytest.skip(f"{engine} has no {matmuls}")
    if find_model_lacks(scenario.engine, model):
        pytest.skip(f"{engine} has no experts")
    if lacks := find_scenario_lacks(scenario):
        pytest.skip(lacks[0])
    estimator = Estimator(scenario)
    peaks = Peaks(estimator)
    pairs = list(all_layouts(Space(scenario, avoided=FEWER)))
    Random(0).shuffle(pairs)
    for layout, kernels in islice((pair for pair in pairs if pair[0].is_legal(model, scenario.batch)), 80):
        pipeline, m = PipelineLayout.of(layout), layout.num_microbatches(scenario.batch)
        block = peaks.block_bytes(key_of(layout, StageLayout), kernels)
        way, in_flight = key_of(layout, StateLayout), peaks.in_flight(pipeline, m)
        held = list(peaks.held_bytes(block, in_flight))
        sizes = [peaks.sizes(each.group.counts, layout.tp, layout.ep) for each in in_flight]
        state = [peaks.state_bytes(way, size, each.has_gradients) for each, size in zip(in_flight, sizes, strict=True)]
        every_rank = estimator.memory(layout, kernels)
        needed = max(rank.needed for rank in every_rank)
        assert peaks.exact(layout, kernels) == (needed, max(rank.total for rank in every_rank)), layout
        for allowed in (needed, 0.99 * needed):
            assert (peaks.exact(layout, kernels, allowed)[0] > allowed) == (needed > allowed), layout
        least = max(map(sum, zip(held, state, strict=True)))
        assert least <= needed * (1 + 1e-12), layout
        if scenario.engine.features.sharding == "distributed-optimizer" and not model.num_first:
            assert least == pytest.approx(needed, rel=1e-12), layout


def test_ranks_with_the_same_stages_are_one_group():
    estimator = Estimator(
        Scenario(
            model=DEEP,
            batch=Batch(global_batch=16, seq_len=512),
            cluster=Cluster(gpu=find_gpu("h100-80g-sxm"), num_gpus=8, gpus_per_node=8),
            engine=find_engine("dtlayout", "h100-80g-sxm"),
        )
    )
    layout = next(pair[0] for pair in all_layouts(Space(estimator.scenario)) if pair[0].pp == 8)
    stages = estimator.groups(PipelineLayout.of(replace(layout, recompute="full")))
    assert sorted(rank for group in stages.groups for rank in group.ranks) == list(range(8))
    assert all(group.recomputes for group in stages.groups)
    assert [group.has_head for group in stages.groups].count(True) == 1
    for group in stages.groups:
        assert sum(count for _, count in group.before) == group.ranks[-1]
