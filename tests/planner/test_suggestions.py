"""What a search was not allowed to choose: schedules that it does not try by itself."""

from dataclasses import replace

import pytest

from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.presets import find_preset
from dtlayout.planner.search import Search
from dtlayout.planner.space import Space
from dtlayout.planner.suggestions import list_remarks, list_ways_to_fit, remark_on_precision, remark_on_schedule
from dtlayout.schedules.schedules import SCHEDULES
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu

FIXED = {"pp": 8, "tp": 1, "cp": 1}


def search_of(max_memory=1.0, **fixed):
    """Twelve microbatches in eight stages, for which no interleaving is legal."""
    gpu = "h100-80g-sxm"
    cluster = Cluster(gpu=find_gpu(gpu), num_gpus=8, gpus_per_node=8)
    batch = Batch(global_batch=12, seq_len=8192)
    model, engine = find_preset("llama3.1-8b"), find_engine("dtlayout", gpu)
    scenario = Scenario(model=model, batch=batch, cluster=cluster, engine=engine)
    return Search(Space(scenario, FIXED | fixed), max_memory)


@pytest.mark.parametrize("compiled", ["none", "blocks"])
def test_a_schedule_that_no_search_tries_is_named_where_it_would_be_faster(compiled):
    search = search_of(**({"compile": "none"} if compiled == "none" else {}))
    (best,) = search.run(top=1).ranked
    assert best.layout.schedule == "1f1b" and best.kernels.compile == compiled
    said = remark_on_schedule(search, best)
    asked = search_of(compile="none", schedule="zb-v", zero=best.layout.zero, recompute=best.layout.recompute)
    asked_for = asked.estimator.estimate(
        replace(best.layout, schedule="zb-v", virtual_stages=2), replace(best.kernels, compile="none")
    )
    gain = 1 - asked_for.step_time_s / best.step_time_s
    eager = " without compile" * (compiled == "blocks")
    assert said.startswith(f"{asked_for.layout}{eager} would be {gain:.1%} faster, ") and "--fix schedule=zb-v" in said
    assert said in list(list_remarks(search, [best]))
    assert asked.run(top=1).ranked[0].step_time_s <= asked_for.step_time_s * (1 + 1e-9)


def test_what_is_asked_for_or_ruled_out_or_cannot_win_is_not_named():
    best = search_of().run(top=1).ranked[0]
    assert "zb-v" in remark_on_schedule(search_of(), best)
    for fixed in ({"schedule": "1f1b"}, {"compile": "blocks"}, {"stage_layers": best.stage_layers}):
        assert remark_on_schedule(search_of(**fixed), best) == ""
    eager = Search(replace(search_of().space, avoided={"compile": ["none"]}))
    assert remark_on_schedule(eager, best) == ""
    titan = replace(search_of().space.scenario, engine=find_engine("torchtitan", "h100-80g-sxm"))
    assert remark_on_schedule(Search(Space(titan, FIXED)), best) == ""
    avoided = {"schedule": [name for name, schedule in SCHEDULES.items() if not schedule.is_searched]}
    assert remark_on_schedule(Search(replace(search_of().space, avoided=avoided)), best) == ""
    many = replace(search_of().space.scenario, batch=Batch(global_batch=2048, seq_len=8192))
    search = Search(Space(many, {**FIXED, "micro_batch": 1}))
    assert remark_on_schedule(search, search.run(top=1).ranked[0]) == ""


def test_where_nothing_fits_a_schedule_that_holds_less_may():
    fixed = {"recompute": "none", "compile": "none"}
    missed = min(search_of(**fixed).run(top=20).ranked, key=lambda e: e.needed_bytes)
    tight = search_of(0.8 * missed.needed_bytes / missed.capacity_bytes, **fixed)
    assert not tight.run(top=1).ranked
    (said,) = [each for each in list_ways_to_fit(tight, missed) if "schedule" in each]
    assert " would fit, " in said and ("--fix schedule=v-half" in said or "--fix schedule=v-min" in said)


def test_layouts_that_take_equally_long_below_bf16_are_named_by_the_first():
    megatron = replace(search_of().space.scenario, engine=find_engine("megatron", "h100-80g-sxm"))
    search = Search(Space(megatron, FIXED))
    (best,) = search.run(top=1).ranked
    said = remark_on_precision(search, [best])
    assert "would be " in said and str(best.layout) in said
    alike = replace(best, layout=replace(best.layout, offload_folder="elsewhere"))
    assert remark_on_precision(search, [best, alike]) == said
