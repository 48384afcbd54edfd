"""The search finds what trying every layout finds, and loses none of the best on the way."""

from collections import Counter
from cProfile import Profile
from dataclasses import replace

import pytest
from layouts import all_layouts
from machine import MACHINE
from tiny import SHAPE

from dtlayout.batch import Batch
from dtlayout.cluster import Cluster, find_gpu
from dtlayout.costmodel.engine import find_engine, find_engine_on
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.scenario import Scenario
from dtlayout.errors import DtlayoutError
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.models.presets import find_preset
from dtlayout.planner.baselines import choose_by_playbook, choose_by_thumb
from dtlayout.planner.search import TIE, Search
from dtlayout.planner.space import Space, parse_choice
from dtlayout.precision import Precision

SMALL = replace(SHAPE, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_size=8192, num_layers=6, vocab_size=32_000)


def scenario(
    num_gpus=8, model=SMALL, *, batch=16, seq_len=512, engine="dtlayout", gpu="a100-80g-sxm", memory=None, per_node=4
):
    found = find_gpu(gpu)
    found = replace(found, memory_bytes=memory) if memory else found
    return Scenario(
        model=model,
        batch=Batch(global_batch=batch, seq_len=seq_len),
        cluster=Cluster(gpu=found, num_gpus=num_gpus, gpus_per_node=per_node),
        engine=find_engine(engine, gpu),
    )


def family_of(layout):
    """All but how the state is shared."""
    return replace(layout, dp_shard=layout.dp, dp_replicate=1, zero=1)


def try_all(space, max_memory=1.0):
    """Every legal layout with its estimate, and how many are not legal or don't fit."""
    estimator, counts, fitting = Estimator(space.scenario), Counter(), []
    for layout, kernels in all_layouts(space):
        legal = layout.is_legal(space.scenario.model, space.scenario.batch)
        if not legal or space.scenario.engine.layout_problems(layout) or not space.allows_kernels(kernels):
            counts["not legal"] += 1
            continue
        estimate = estimator.estimate(layout, kernels)
        if estimate.needed_bytes > max_memory * estimator.capacity_bytes:
            counts["does not fit"] += 1
        else:
            fitting.append(estimate)
    return fitting, counts


def rank_all(estimates, top):
    """The rule of `dtlayout.planner.search`, written down once more and without any shortcut."""
    left, best = list(estimates), []
    while left and len(best) < top:
        fastest = min(e.step_time_s for e in left)
        ties = [e for e in left if e.step_time_s <= fastest * (1 + TIE)]
        best.append(
            min(
                ties,
                key=lambda e: (
                    round(100 * e.peak_bytes / e.capacity_bytes), e.layout.tp * e.layout.pp, round(e.step_time_s, 12)
                ),
            )
        )  # fmt: skip
        left = [e for e in left if family_of(e.layout) != family_of(best[-1].layout)]
    return best


FEWER = {"attention": ["sdpa-math"], "norm": ["eager"], "recompute": ["every-2", "every-8"], "micro_batch": [8, 16]}
SCENARIOS = {
    "roomy": scenario(),
    "tight": scenario(memory=int(12e9)),
    "tighter": scenario(memory=int(8e9)),
    "nodes of two": scenario(per_node=2, memory=int(10e9)),
    "long": scenario(4, batch=8, seq_len=4096, memory=int(20e9)),
    "six": scenario(6, batch=12, memory=int(9e9)),
    "few microbatches": scenario(8, batch=4, memory=int(9e9)),
    "megatron": scenario(engine="megatron", memory=int(12e9)),
    "calibrated cores": Scenario(
        model=replace(SHAPE, num_layers=6), batch=Batch(global_batch=8, seq_len=128), cluster=MACHINE,
        engine=find_engine_on("dtlayout", MACHINE.gpu), precision=Precision(compute="float32"),
    ),
    "nanotron": scenario(engine="nanotron", gpu="h100-80g-sxm", memory=int(14e9)),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_best_found_are_the_best_of_all(name):
    fewer = {"attention": ["sdpa-math"], "recompute": ["every-4"]} if name == "six" else FEWER
    space = Space(SCENARIOS[name], avoided=fewer)
    fitting, counts = try_all(space)
    result = Search(space).run(top=4)
    expected = rank_all(fitting, 4)
    assert [(e.layout, e.kernels) for e in result.ranked] == [(e.layout, e.kernels) for e in expected]
    assert [e.step_time_s for e in result.ranked] == [e.step_time_s for e in expected]
    assert result.num_layouts == len(fitting) + counts.total()
    assert result.counts["not legal"] == counts["not legal"]


@pytest.mark.parametrize("name", ["tight", "six"])
def test_every_layout_that_was_left_out_has_its_reason(name):
    space = Space(SCENARIOS[name], avoided={**FEWER, "norm": []})
    fitting, counts = try_all(space)
    result = Search(space).run(top=3)
    assert result.counts["not legal"] == counts["not legal"]
    assert result.counts["does not fit"] <= counts["does not fit"]
    assert result.counts["ranked"] == len(result.ranked) == 3
    assert result.counts["slower"] + result.counts["sharded otherwise"] <= len(fitting) + counts["does not fit"]
    assert result.num_layouts == len(fitting) + counts.total()
    only_fast = Search(Space(SCENARIOS[name], avoided=FEWER)).run(top=3)
    assert only_fast.counts["slower kernels"] == 0
    assert only_fast.counts["does not fit"] == result.counts["does not fit"]
    assert only_fast.ranked == result.ranked


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_less_may_be_allowed_and_nothing_that_fits_is_called_a_oom(share):
    space = Space(SCENARIOS["tighter"], avoided=FEWER)
    fitting, counts = try_all(space, share)
    result = Search(space, share).run(top=2)
    assert 0 < result.counts["does not fit"] <= counts["does not fit"]
    assert all(e.peak_bytes <= share * e.capacity_bytes for e in result.ranked)
    assert result.num_layouts == len(fitting) + counts.total()


def test_where_nothing_fits_the_smallest_oom_is_the_smallest_of_all():
    space = Space(scenario(memory=int(3e9)), avoided=FEWER)
    result = Search(space).run()
    assert result.ranked == () and result.smallest_oom is not None
    estimator = Estimator(space.scenario)
    legal = [pair for pair in all_layouts(space) if pair[0].is_legal(SMALL, space.scenario.batch)]
    smallest = min(estimator.estimate(*pair).needed_bytes for pair in legal)
    assert result.smallest_oom.needed_bytes == pytest.approx(smallest, rel=0.5)
    assert not Search(space).finds_any()


def test_what_is_fixed_stands_and_what_is_avoided_does_not():
    fixed = {"tp": 2, "micro_batch": 2, "dp_replicate": 2, "norm": "eager"}
    result = Search(Space(scenario(), fixed, {"recompute": ["none", "selective"], "pp": [1]})).run(top=20)
    assert result.ranked
    for found in result.ranked:
        layout = found.layout
        assert (layout.tp, layout.micro_batch, layout.dp_replicate, found.kernels.norm) == (2, 2, 2, "eager")
        assert layout.recompute not in ("none", "selective") and layout.pp > 1


def test_stages_can_be_fixed_as_a_list():
    result = Search(Space(scenario(), {"stage_layers": (4, 2)})).run()
    assert all(found.stage_layers == (4, 2) for found in result.ranked) and result.ranked
    assert Search(Space(scenario(), {"cp": 2})).run().counts["not legal"] > 0


def test_flash_attention_is_not_recommended_where_it_cannot_compute():
    exact = replace(scenario(), precision=Precision(compute="float32"))
    assert {e.kernels.attention for e in Search(Space(exact)).run().ranked} == {"sdpa-efficient"}


def test_a_shared_state_stays_inside_whole_nodes():
    space = Space(scenario(64, batch=64, per_node=8))
    assert sorted({shard for shard, _ in space.shardings(tp=2, dp=32)}) == [1, 4, 8, 16, 32]
    assert [zero for shard, zero in space.shardings(tp=1, dp=64) if shard == 1] == [1]


def test_a_shared_state_may_fill_what_fast_links_join():
    space = Space(scenario(144, batch=144, gpu="gb200"))
    assert sorted({shard for shard, _ in space.shardings(tp=2, dp=72)}) == [1, 2, 4, 8, 36, 72]


@pytest.mark.parametrize("choose", [choose_by_thumb, choose_by_playbook])
def test_advice_takes_tp_as_far_as_fast_links_reach(choose):
    """tp = 4 has too little memory, and a node 4 GPUs: 8 are joined in a rack alone."""
    rack, nodes = (choose(Search(Space(scenario(8, gpu=gpu, memory=5 * 10**9)))) for gpu in ("gb200", "h100-80g-sxm"))
    assert rack.estimate.layout.tp == 8 and nodes.estimate.layout.tp == 4


def test_the_space_has_one_interleaved_schedule_for_each_size_of_a_stage():
    space = Space(scenario(model=replace(SMALL, num_layers=40)))
    assert [v for name, v in space.orders(4) if name == "interleaved-1f1b"] == [2, 3, 4, 5, 10]
    assert space.orders(1) == [("1f1b", 1)]


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("tp=2", ("tp", 2)),
        ("layout.recompute = full", ("recompute", "full")),
        ("attention=sdpa-math", ("attention", "sdpa-math")),
        ("sequence_parallel=false", ("sequence_parallel", False)),
        ("stage_layers=[2, 4]", ("stage_layers", (2, 4))),
    ],
)
def test_a_choice_is_read_as_toml_writes_it(text, choice):
    assert parse_choice(text) == choice


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tp", "'tp' is no choice; write name=value, such as tp=2"),
        ("micro_bach=2", "micro_bach is unknown; did you mean micro_batch?"),
        ("xyz=2", "xyz is unknown; known: pp, "),
        ("tp=two", "tp=two must be a whole number"),
        ("tp=true", "tp=true must be a whole number"),
        ("tp=0", "layout.tp=0 must be at least 1"),
        ("zero=4", "layout.zero=4 is unknown; use one of"),
        ("norm=odd", "kernels.norm='odd' is unknown; use one of"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused(text, problem):
    with pytest.raises(DtlayoutError) as caught:
        parse_choice(text)
    assert str(caught.value).startswith(problem)


def test_more_is_searched_in_a_second_than_ten_thousand_layouts_without_building_each():
    """Not timed here: only as many are estimated one by one as may be among the best."""
    large = scenario(64, find_preset("llama-13b"), batch=512, seq_len=2048, per_node=8)
    counts = Search(Space(large)).run().counts
    assert sum(counts.values()) - counts["not legal"] > 10_000
    assert counts["slower"] < 1000


@pytest.mark.parametrize(("hidden_size", "fits"), [(2048, False), (64, True)])
def test_ten_times_the_layers_are_not_ten_times_the_work(hidden_size, fits):
    """40,000 layers are searched in seconds: calls are counted, of functions of ours and of others."""
    fixed = {"tp": 1, "pp": 2, "micro_batch": 1, "recompute": "full", "attention": "sdpa-flash", "norm": "fused"}

    def count_calls(num_layers: int) -> int:
        model = replace(
            SMALL, hidden_size=hidden_size, ffn_size=2 * hidden_size, num_layers=num_layers, num_heads=2, num_kv_heads=2
        )
        search, calls = Search(Space(scenario(8, model, batch=8, per_node=8), fixed)), Profile()
        found = calls.runcall(search.run, top=1)
        assert bool(found.ranked) == fits
        return sum(entry.callcount for entry in calls.getstats())

    assert count_calls(40_000) < 4 * count_calls(4_000)


def test_kernels_are_only_left_out_for_others_that_are_no_slower_and_no_larger():
    estimator = Estimator(SCENARIOS["roomy"])
    layout = Layout(tp=2, dp_shard=4)
    first, *others = Space(SCENARIOS["roomy"]).kernels
    assert first == Kernels(compile="blocks")  # what the trainer's auto is on an A100
    best = estimator.estimate(layout, first)
    for kernels in others:
        other = estimator.estimate(layout, kernels)
        assert other.step_time_s >= best.step_time_s and other.peak_bytes >= best.peak_bytes
