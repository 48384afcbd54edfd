"""The search finds what trying every layout finds, and loses none of the best on the way."""

from collections import Counter, defaultdict
from cProfile import Profile
from dataclasses import replace
from functools import cache
from math import inf

import pytest
from layouts import all_layouts
from machine import MACHINE
from thorough import mostly_thorough, thorough
from tiny import SHAPE

from dtlayout.base.errors import DtlayoutError
from dtlayout.costmodel.engine import find_engine, find_engine_on
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.scenario import Scenario, find_refusals
from dtlayout.models.presets import find_preset
from dtlayout.planner.baselines import choose_by_playbook, choose_by_thumb
from dtlayout.planner.choices import parse_choices
from dtlayout.planner.ranking import MAX_SLOWDOWN, TIE, LayoutKind
from dtlayout.planner.search import Search
from dtlayout.planner.space import Degrees, Space
from dtlayout.planner.suggestions import remark_on_offload
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts
from dtlayout.spec.optimizers import Muon
from dtlayout.spec.precision import Precision

SMALL = replace(SHAPE, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_size=8192, num_layers=6, vocab_size=32_000)


def scenario(
    num_gpus=8, model=SMALL, *, batch=16, seq_len=512, engine="dtlayout", gpu="a100-80g-sxm", memory=None, per_node=4,
    **told,
):  # fmt: skip
    found = find_gpu(gpu)
    found = replace(found, memory_bytes=memory) if memory else found
    return Scenario(
        model=model,
        batch=Batch(global_batch=batch, seq_len=seq_len),
        cluster=Cluster(gpu=found, num_gpus=num_gpus, gpus_per_node=per_node),
        engine=find_engine(engine, gpu).told(told),
    )


def group_of(layout):
    """The layout without state sharding and overlaps: `Search.run` ranks one layout of each such group."""
    off = {"tp_overlap": False, "ep_overlap": False, "ep_dispatcher": "alltoall"}
    return replace(layout, dp_shard=layout.dp, dp_replicate=1, zero=1, **off)


@cache
def estimate_all(name, avoided, fixed=()):
    """Every legal layout of one of SCENARIOS, with its estimate, and how many are not legal."""
    space, estimates, num_illegal = Space(SCENARIOS[name], dict(fixed), dict(avoided)), [], 0
    estimator = Estimator(space.scenario)
    for layout, kernels in all_layouts(space):
        legal = layout.is_legal(space.scenario.model, space.scenario.batch)
        if not legal or find_refusals(space.scenario, layout, kernels):
            num_illegal += 1
        else:
            estimates.append(estimator.estimate(layout, kernels))
    return estimates, num_illegal


def try_all(name, avoided, fixed=(), share=1.0):
    """Every legal layout that fits, with its estimate, and how many are not legal or don't fit."""
    estimates, num_illegal = estimate_all(name, avoided, fixed)
    fitting = [e for e in estimates if e.needed_bytes <= share * e.capacity_bytes]
    return fitting, Counter({"not legal": num_illegal, "does not fit": len(estimates) - len(fitting)})


def is_dominated(estimate, better):
    """The rule of `dtlayout.planner.ranking`, written down once more."""
    parts = [
        (e.layout.tp > 1, e.layout.pp > 1, e.layout.cp > 1, e.layout.ep > 1, e.layout.virtual_stages > 1,
         e.layout.recompute != "none")
        for e in (estimate, better)
    ]  # fmt: skip
    return all(own >= others for own, others in zip(*parts, strict=True)) and (
        estimate.peak_bytes > 0.95 * better.peak_bytes
    )


def preference(e):
    percent = round(100 * e.peak_bytes / e.capacity_bytes)
    return percent, e.layout.tp * e.layout.pp, round(e.step_time_s, 12), f"{e.layout} {e.kernels}"


def choose_in_tie(estimates):
    """The preferred of the estimates that are as fast as the fastest."""
    fastest = min(e.step_time_s for e in estimates)
    return min((e for e in estimates if e.step_time_s <= fastest * (1 + TIE)), key=preference)


def rank_all(estimates, top, alike=group_of, max_slowdown=inf, dominance=lambda estimate, better: False):
    """The rule of `dtlayout.planner.search`, written down once more and without any shortcut."""
    fastest = min(e.step_time_s for e in estimates)
    groups = defaultdict(list)
    for e in estimates:
        if e.step_time_s <= max_slowdown * fastest:
            groups[alike(e.layout) if top > 1 else None].append(e)
    fastest_of = {group: min(e.step_time_s for e in own) for group, own in groups.items()}
    groups = {
        group: [e for e in own if e.step_time_s <= (1 + TIE) * fastest_of[group]] for group, own in groups.items()
    }
    best, preferred = [], {group: min(own, key=preference) for group, own in groups.items()}
    while groups and len(best) < top:
        best.append(choose_in_tie([e for own in groups.values() for e in own]))
        ranked = alike(best[-1].layout) if top > 1 else None
        groups = {
            group: left
            for group, own in groups.items()
            if group != ranked
            and not dominance(preferred[group], best[-1])
            and (left := [e for e in own if not dominance(e, best[-1])])
        }
    return best


FEWER = (
    ("attention", ("sdpa-math", "flash-attn", "fa3", "megatron-softmax")), ("recompute", ("every-2", "every-8")),
    ("micro_batch", (8, 16)), ("loss", ("linear",)), ("cp_method", ("gather",)),
)  # fmt: skip
"""Values that are avoided, as items of a dictionary."""
FUSED = (*FEWER, ("norm", ("eager",)))
"""As FEWER, with half of the kernels, for scenarios with many layouts; others have the slower norm."""
OTHERS = {
    "six": tuple({**dict(FEWER), "recompute": ("every-4",)}.items()),
    "calibrated cores": FUSED,
    "few microbatches": FUSED,
}
"""Scenario → values that are avoided there in place of FEWER."""
EXPERTS = replace(SMALL, experts=Experts(number=8, per_token=2, ffn_size=2048, dense_layers=1))
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
    "long on megatron": scenario(engine="megatron", gpu="h100-80g-sxm", batch=4, seq_len=16_384, memory=int(24e9)),
    "long on torchtitan": scenario(
        4, engine="torchtitan", gpu="h100-80g-sxm", batch=2, seq_len=16_384, memory=int(30e9)
    ),
    "experts on megatron": scenario(
        4, EXPERTS, engine="megatron", gpu="h100-80g-sxm", batch=8, memory=int(20e9),
        recompute_modules="core_attn+layernorm+moe",
    ),
    "experts on prime-rl": scenario(8, EXPERTS, engine="prime-rl", gpu="h100-80g-sxm", memory=int(20e9)),
    "fsdp1": scenario(engine="fsdp1", memory=int(20e9)),
    "muon": replace(scenario(4, batch=8, memory=int(12e9)), optimizer=Muon()),
}  # fmt: skip

LARGE = ("roomy", "tight", "tighter", "nodes of two")
"""Scenarios that differ in memory and nodes alone; together they have as many layouts as all others."""


@pytest.mark.parametrize("name", mostly_thorough(SCENARIOS, lambda _, name: name not in (*LARGE, "six", "muon")))
def test_the_best_found_are_the_best_of_all(name):
    fewer = OTHERS.get(name, FEWER)
    space = Space(SCENARIOS[name], avoided=dict(fewer))
    fitting, counts = try_all(name, fewer)
    search = Search(space)
    result, kinds = search.run(top=4), search.run_kinds(top=4)
    for found, expected in (
        (result, rank_all(fitting, 4)),
        (kinds, rank_all(fitting, 4, alike=LayoutKind.of, max_slowdown=MAX_SLOWDOWN, dominance=is_dominated)),
    ):
        assert [(e.layout, e.kernels) for e in found.ranked] == [(e.layout, e.kernels) for e in expected]
        assert [e.step_time_s for e in found.ranked] == [e.step_time_s for e in expected]
        assert found.num_layouts == len(fitting) + counts.total()
        assert found.counts["not legal"] == counts["not legal"]
    for choice, value in (("recompute", "full"), ("zero", 1), ("tp", 2), ("micro_batch", 1)):
        having = [e for e in fitting if getattr(e.layout, choice) == value]
        best = search.best_with(choice, value)
        assert (best and (best.layout, best.kernels)) == (
            (rank_all(having, 1)[0].layout, rank_all(having, 1)[0].kernels) if having else None
        )


@pytest.mark.parametrize("name", [thorough("tight"), thorough("six"), "long"])
def test_every_layout_that_was_left_out_has_its_reason(name):
    every_loss = tuple({**dict(FUSED), "loss": ()}.items())
    fitting, counts = try_all(name, every_loss)
    result = Search(Space(SCENARIOS[name], avoided=dict(every_loss))).run(top=3)
    assert result.counts["not legal"] == counts["not legal"]
    assert result.counts["does not fit"] <= counts["does not fit"]
    assert result.counts["ranked"] == len(result.ranked) == 3
    assert result.counts["slower"] + result.counts["alike"] <= len(fitting) + counts["does not fit"]
    assert result.num_layouts == len(fitting) + counts.total()
    only_fast = Search(Space(SCENARIOS[name], {"compile": "blocks", "tp_overlap": False}, dict(FEWER))).run(top=3)
    assert only_fast.counts["slower kernels"] == 0


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_less_may_be_allowed_and_nothing_that_fits_is_called_a_oom(share):
    space = Space(SCENARIOS["few microbatches"], avoided=dict(FUSED))
    fitting, counts = try_all("few microbatches", FUSED, share=share)
    result = Search(space, share).run(top=20)
    assert 0 < result.counts["does not fit"] <= counts["does not fit"]
    assert all(e.peak_bytes <= share * e.capacity_bytes for e in result.ranked)
    assert result.num_layouts == len(fitting) + counts.total()


@pytest.mark.parametrize("name", [thorough("roomy"), "megatron", "experts on megatron", "long on torchtitan"])
def test_where_nothing_fits_the_smallest_oom_is_the_smallest_of_all(name):
    roomy = SCENARIOS[name]
    tiny = replace(roomy.cluster, gpu=replace(roomy.cluster.gpu, memory_bytes=int(2.6e9)))
    space = Space(replace(roomy, cluster=tiny), avoided=dict(FEWER))
    search = Search(space)
    assert search.run().ranked == ()
    assert search.find_smallest_oom().needed_bytes == min(e.needed_bytes for e in estimate_all(name, FEWER)[0])
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


def find_shards(space: Space, **degrees: int) -> list[int]:
    """Ranks of dp that may share the state."""
    return sorted({way.dp_shard for way in space.shardings(Degrees(**{"tp": 1, "pp": 1, "cp": 1, "ep": 1} | degrees))})


def test_a_state_is_shared_by_powers_of_two_of_ranks_and_in_whole_nodes():
    space = Space(scenario(64, batch=64, per_node=8))
    assert find_shards(space, tp=2, dp=32) == [1, 2, 4, 8, 16, 32]
    assert find_shards(space, dp=48) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    in_sixes = Space(scenario(72, batch=72, per_node=6))
    assert find_shards(in_sixes, dp=36) == [1, 2, 4, 6, 9, 18, 36]
    assert find_shards(in_sixes, cp=2, dp=36) == [1, 2, 3, 4, 9, 18, 36], "three ranks of dp, with cp's, fill a node"
    assert [zero for shard, zero in space.shardings(Degrees(1, 1, 1, 1, dp=64)) if shard == 1] == [1]


def test_a_stage_of_zero_that_is_fixed_is_one_of_ranks_that_share():
    space = Space(scenario(64, batch=64), {"zero": 2})
    assert {way.zero for way in space.shardings(Degrees(1, 1, 1, 1, dp=64))} == {2}
    assert 1 not in find_shards(space, dp=64) and find_shards(space, tp=8, pp=8, dp=1) == [1]


def test_one_data_parallel_rank_may_free_the_copies_that_it_computes_with():
    alone = Degrees(tp=8, pp=8, cp=1, ep=1, dp=1)
    assert [way.zero for way in Space(scenario(64, batch=64)).shardings(alone)] == [1, 3]
    assert [way.zero for way in Space(scenario(64, batch=64, engine="megatron")).shardings(alone)] == [1]
    one, three = (
        Search(Space(scenario(1, batch=8), {"zero": zero, "micro_batch": 1, "recompute": "none"})).run(top=1).ranked[0]
        for zero in (1, 3)
    )
    assert three.peak_bytes < one.peak_bytes


def test_a_shared_state_may_fill_what_fast_links_join():
    space = Space(scenario(144, batch=144, gpu="gb200"))
    assert find_shards(space, tp=2, dp=72) == [1, 2, 4, 8, 9, 18, 36, 72]
    assert find_shards(space, tp=8, dp=18) == [1, 2, 9, 18]


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
        ("tp=2", {"tp": 2}),
        ("layout.recompute = full", {"recompute": "full"}),
        ("attention=sdpa-math", {"attention": "sdpa-math"}),
        ("sequence_parallel=false", {"sequence_parallel": False}),
        ("stage_layers=[2, 4]", {"stage_layers": (2, 4)}),
        ("stage_layers=[2, 4],pp2", {"stage_layers": (2, 4), "pp": 2}),
        ("dp128", {"dp_shard": 128}),
        ("dp=128", {"dp_shard": 128}),
        ("pp8·dp2·tp4", {"pp": 8, "dp_shard": 2, "tp": 4}),
        ("pp8 * dp2 * tp4+sp loss linear sdpa-flash", {
            "pp": 8, "dp_shard": 2, "tp": 4, "sequence_parallel": True, "loss": "linear", "attention": "sdpa-flash",
        }),
    ],
)  # fmt: skip
def test_choices_are_read_as_toml_writes_them_or_as_layouts_are_printed(text, choice):
    assert parse_choices(text) == choice


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tp", "'tp' is no choice; write a layout as it is printed, such as pp8·dp2·tp4+sp mb1 1f1b zero1, or name="),
        ("", "'' is no choice; "),
        ("pp2·tp8·tp4", "tp=4 and tp=8: say one of them"),
        ("norm", "'norm' is no choice; "),
        ("tp4+quick", "'tp4+quick' is no choice; "),
        ("dp0", "layout.dp_shard=0 must be at least 1"),
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
        parse_choices(text)
    assert str(caught.value).startswith(problem)


def test_more_is_searched_in_a_second_than_ten_thousand_layouts_without_building_each():
    """Not timed here: only as many are estimated one by one as may be among the best."""
    large = scenario(64, find_preset("llama-13b"), batch=512, seq_len=2048, per_node=8)
    counts = Search(Space(large)).run().counts
    assert sum(counts.values()) - counts["not legal"] > 10_000
    assert counts["slower"] < 1000


@pytest.mark.parametrize(("hidden_size", "fits"), [(2048, False), (64, True)])
def test_ten_times_the_layers_are_not_ten_times_the_work(hidden_size, fits):
    """The most layers are searched in seconds: calls are counted, of functions of ours and of others."""
    fixed = {"tp": 1, "pp": 2, "micro_batch": 1, "recompute": "full", "attention": "sdpa-flash", "norm": "fused"}

    def count_calls(num_layers: int) -> int:
        model = replace(
            SMALL, hidden_size=hidden_size, ffn_size=2 * hidden_size, num_layers=num_layers, num_heads=2, num_kv_heads=2
        )
        search, calls = Search(Space(scenario(8, model, batch=8, per_node=8), fixed)), Profile()
        found = calls.runcall(search.run, top=1)
        assert bool(found.ranked) == fits
        return sum(entry.callcount for entry in calls.getstats())

    assert count_calls(10_000) < 4 * count_calls(1_000)


def test_kernels_are_only_left_out_for_others_that_are_no_slower_and_no_larger():
    estimator = Estimator(SCENARIOS["roomy"])
    layout = Layout(tp=2, dp_shard=4)
    first, *others = Space(SCENARIOS["roomy"]).kernels
    assert first == Kernels(compile="blocks")  # what the trainer's auto is on an A100
    best = estimator.estimate(layout, first)
    for kernels in others:
        other = estimator.estimate(layout, kernels)
        assert other.step_time_s >= best.step_time_s and other.peak_bytes >= best.peak_bytes


@pytest.mark.parametrize("offload", [*map(thorough, ("activations", "both")), "optimizer"])
def test_with_offload_fixed_the_best_found_is_the_best_of_all(offload):
    fixed = (("offload", offload), ("micro_batch", 2))
    fitting, _ = try_all("tighter", FEWER, fixed)
    search = Search(Space(SCENARIOS["tighter"], dict(fixed), dict(FEWER)))
    found, expected = search.run(top=1).ranked, rank_all(fitting, 1)
    assert [(e.layout, e.kernels, e.step_time_s) for e in found] == [
        (e.layout, e.kernels, e.step_time_s) for e in expected
    ]
    assert found and found[0].layout.offload == offload


def test_what_asks_more_of_the_host_than_it_has_does_not_fit():
    roomy = SCENARIOS["roomy"]
    gpu = replace(roomy.cluster.gpu, host_memory_bytes=2**20)
    small = replace(roomy, cluster=replace(roomy.cluster, gpu=gpu))
    assert Search(Space(small)).run(top=1).ranked
    assert not Search(Space(small, {"offload": "both"})).run(top=1).ranked


def test_where_nothing_fits_what_would_with_the_hosts_memory_is_named():
    hopeless = Search(Space(scenario(memory=int(3.5e9)), {"micro_batch": 1}))
    assert not hopeless.run(top=1).ranked
    missed = hopeless.find_smallest_oom()
    named = remark_on_offload(hopeless, missed)
    offload = named.partition("--fix offload=")[2].split()[0]
    best = Search(Space(hopeless.space.scenario, {"micro_batch": 1, "schedule": "1f1b", "offload": offload}))
    assert f"{best.run(top=1).ranked[0].layout} would fit, " in named
    assert remark_on_offload(Search(Space(hopeless.space.scenario, {"offload": "none"})), missed) == ""


def test_the_disk_is_named_where_its_host_has_too_little_memory_and_the_disk_is_known():
    roomy, fixed = scenario(memory=int(3.5e9)), {"pp": 1, "tp": 1, "cp": 1, "recompute": "full", "micro_batch": 1}
    (small, unknown), named = (
        (replace(roomy.cluster.gpu, host_memory_bytes=2**30, disk_bytes_per_s=speed) for speed in (6e9, None)),
        [],
    )
    for gpu in (replace(small, host_memory_bytes=roomy.cluster.gpu.host_memory_bytes), small, unknown):
        search = Search(Space(replace(roomy, cluster=replace(roomy.cluster, gpu=gpu)), dict(fixed)))
        assert not search.run(top=1).ranked
        named.append(remark_on_offload(search, search.find_smallest_oom()))
    with_memory, with_disk, without = named
    assert "--fix offload=optimizer " in with_memory and "disk" not in with_memory
    assert with_disk.startswith("With --fix offload=disk ")
    assert with_disk.endswith("GiB of the host's memory for a GPU and 2 GiB of its disk.")
    assert without == ""
