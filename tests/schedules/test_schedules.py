"""Records of schedules: what layouts, search and predictions read of one that is registered from outside."""

from collections import Counter
from dataclasses import replace

import pytest
from outside import LATE_WEIGHTS, V_GPIPE, registered

from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.config.checking import check_layout
from dtlayout.config.loading import load_config
from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.fsdp2.memory import estimate_curve
from dtlayout.costmodel.fsdp2.steps import find_rows
from dtlayout.costmodel.scenario import Scenario, engine_kernels
from dtlayout.dryrun.rank import fold
from dtlayout.models.presets import find_preset
from dtlayout.planner.search import Search
from dtlayout.planner.space import Space
from dtlayout.schedules.actions import Kind
from dtlayout.schedules.schedules import DEFAULT_SCHEDULE, SCHEDULES, find_schedule, register_schedule, schedule_with
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels, OpenKernels
from dtlayout.spec.layout import Layout

MODEL = find_preset("llama3.2-1b")
SCENARIO = Scenario(
    model=MODEL,
    batch=Batch(global_batch=64, seq_len=2048),
    cluster=Cluster(gpu=find_gpu("h100-80g-sxm"), num_gpus=8, gpus_per_node=8),
    engine=find_engine("dtlayout", "h100-80g-sxm"),
)
V = Layout(pp=4, dp_shard=2, virtual_stages=2)


@pytest.fixture(autouse=True, scope="module")
def _outside():
    with registered(V_GPIPE, LATE_WEIGHTS):
        yield


def v_shaped(**changes) -> Layout:
    return replace(V, **({"schedule": "v-gpipe"} | changes))


def test_a_name_is_given_once():
    with pytest.raises(InvalidConfig, match="schedule 'late-weights' is registered already; give yours another name"):
        register_schedule(replace(V_GPIPE, name="late-weights"))


def test_what_is_registered_is_known_beside_what_is_shipped_and_forgotten_after_the_block():
    with registered(replace(V_GPIPE, name="mine")):
        assert list(SCHEDULES)[-1] == "mine"
        Layout(schedule="mine")
    with pytest.raises(InvalidLayout, match=r"'mine' is unknown; use one of \['gpipe', '1f1b', 'interleaved-1f1b', "):
        Layout(schedule="mine")


def test_the_default_takes_no_virtual_stages_and_others_do():
    assert schedule_with(1) == DEFAULT_SCHEDULE and find_schedule(DEFAULT_SCHEDULE).takes(1, 1)
    assert find_schedule(schedule_with(2)).takes(2, 2) and find_schedule(schedule_with(7)).takes(2, 7)


def test_only_schedules_with_such_actions_split_backwards():
    assert [name for name, schedule in SCHEDULES.items() if schedule.splits_backward] == [
        *("zb-h1", "interleaved-zb", "zb-v", "v-half", "v-min", "dualpipe-v", "late-weights")
    ]


@pytest.mark.parametrize(
    ("changes", "problem", "advice"),
    [
        (
            {"virtual_stages": 3},
            "schedule=v-gpipe needs pp > 1 and virtual_stages = 2, but pp=4 and virtual_stages=3",
            "use virtual_stages=2 or schedule=1f1b with virtual_stages=1",
        ),
        (
            {"virtual_stages": 1},
            "schedule=v-gpipe needs pp > 1 and virtual_stages = 2, but pp=4 and virtual_stages=1",
            "use virtual_stages=2 or schedule=1f1b with virtual_stages=1",
        ),
        (
            {"schedule": "late-weights"},
            "virtual_stages=2 has no meaning for schedule=late-weights",
            "use virtual_stages=1 or schedule=interleaved-1f1b or schedule=looped-bfs",
        ),
        (
            {"virtual_stages": 1, "schedule": "late-weights", "micro_batch": 16},
            "schedule=late-weights needs at least pp=4 microbatches, but global_batch=64 with dp=2 and micro_batch=16 "
            "gives 2",
            "use micro_batch=8 or micro_batch=4 or global_batch=128",
        ),
    ],
)
def test_a_layout_is_refused_by_what_the_record_says(changes, problem, advice):
    assert v_shaped(**changes).problems(MODEL, SCENARIO.batch) == [f"{problem}; {advice}"]


def test_a_record_may_ask_for_more_microbatches_than_ranks():
    with registered(replace(V_GPIPE, name="v-two-rounds", least_rounds=2)):
        layout = replace(V, schedule="v-two-rounds", micro_batch=8)
        (problem,) = layout.problems(MODEL, SCENARIO.batch)
    assert "needs at least 2 * pp=4 microbatches" in problem and "gives 4; use micro_batch=4 or" in problem


def test_stages_in_a_v_lie_on_both_ends_of_rank_0():
    assert v_shaped().placement.stages_of(0) == (0, 7)
    estimator = Estimator(SCENARIO)
    looped, v = (estimator.estimate(replace(V, schedule=name), Kernels()) for name in ("interleaved-1f1b", "v-gpipe"))
    assert sum(rank.logits > 0 for rank in v.memory) == 1 and v.memory[0].logits > 0 == looped.memory[0].logits
    assert sum(r.parameters + r.optimizer for r in v.memory) == pytest.approx(
        sum(r.parameters + r.optimizer for r in looped.memory)
    )
    assert v.time.total > looped.time.total  # all forwards first, through both chunks: twice the bubble


BREADTH_FIRST = [V_GPIPE, *(find_schedule(name) for name in ("gpipe", "looped-bfs"))]


@pytest.mark.parametrize("schedule", BREADTH_FIRST, ids=lambda s: s.name)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("offloads", [False, True])
def test_rows_that_are_made_longer_have_each_microbatch_once(schedule, m, offloads):
    placement = schedule.place(4, schedule.least_virtual_stages)
    for rank in range(4):
        rows, order = find_rows(schedule, placement, m, rank, offloads)
        counts = Counter[tuple[int, Kind]]()
        for step, count in (rows[place] for place in order):
            counts += {(step.chunk, step.kind): count} if step else {}
        chunks = range(schedule.least_virtual_stages)
        assert counts == {(chunk, kind): m for chunk in chunks for kind in (Kind.FORWARD, Kind.BACKWARD)}


@pytest.mark.parametrize("schedule", BREADTH_FIRST, ids=lambda s: s.name)
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("zero", [1, 3])
def test_rows_that_are_made_longer_hold_what_playing_them_whole_does(schedule, microbatches, zero):
    layout = Layout(pp=4, dp_shard=2, virtual_stages=schedule.least_virtual_stages, zero=zero, recompute="every-2")
    scenario = replace(SCENARIO, batch=Batch(global_batch=2 * microbatches, seq_len=2048))
    with registered(replace(schedule, name="whole", is_breadth_first=False, fast=None)):
        rows, whole = (
            tuple(Estimator(scenario).memory(replace(layout, schedule=name), Kernels()))
            for name in (schedule.name, "whole")
        )
    for one, other in zip(rows, whole, strict=True):
        assert one.as_dict() == pytest.approx(other.as_dict())


@pytest.mark.parametrize("name", ["v-gpipe", "late-weights"])
def test_the_curve_of_a_step_from_outside_has_the_peak_of_its_rank(name):
    layout = replace(V, schedule=name, virtual_stages=find_schedule(name).least_virtual_stages)
    estimator, m = Estimator(SCENARIO), layout.num_microbatches(SCENARIO.batch)
    memory, stages = estimator.memory(layout, Kernels()), estimator.stages(layout)
    for rank, found in enumerate(memory):
        curve = list(estimate_curve(SCENARIO, layout, Kernels(), stages, rank, m))
        assert max(fullest for _, fullest, _ in curve) == pytest.approx(found.total)
        assert curve[-1][2] <= curve[-1][1]


def test_gradients_of_weights_that_come_later_shorten_the_bubble_and_hold_activations():
    estimator = Estimator(SCENARIO)
    plain = replace(V, virtual_stages=1)
    whole, split = (estimator.estimate(replace(plain, schedule=name), Kernels()) for name in ("1f1b", "late-weights"))
    assert split.time.bubble < whole.time.bubble and split.time.compute == pytest.approx(whole.time.compute)
    assert split.memory[0].activations == pytest.approx(whole.memory[0].activations, rel=0.1)
    assert split.memory[3].activations > 2 * whole.memory[3].activations


@pytest.mark.parametrize("engine", ["torchtitan", "aa-scaling"])
@pytest.mark.parametrize("name", ["v-gpipe", "late-weights"])
def test_a_search_can_be_held_to_it(name, engine):
    scenario = replace(SCENARIO, engine=find_engine(engine, "h100-80g-sxm"))
    result = Search(Space(scenario, fixed={"schedule": name, "pp": 4})).run()
    assert result.ranked
    for found in result.ranked:
        assert found.layout.schedule == name and found.fits
        assert found.time.total == pytest.approx(Estimator(scenario).estimate(found.layout, found.kernels).time.total)


def test_a_search_that_is_held_to_nothing_tries_it_too():
    orders = Space(SCENARIO).orders(4)
    assert ("v-gpipe", 2) in orders and ("late-weights", 1) in orders and Space(SCENARIO).orders(1) == [("1f1b", 1)]


def test_a_config_may_name_it_and_an_unknown_one_is_refused_with_the_known_ones():
    asked = ["--layout.pp=2", "--layout.virtual_stages=2", "--layout.schedule=v-gpipe"]
    assert check_layout(load_config("configs/debug.toml", asked), 8).placement.rank_of(3) == 0
    with pytest.raises(InvalidConfig) as caught:
        load_config("configs/debug.toml", ["--layout.schedule=zigzag"])
    assert caught.value.problems == [f"layout.schedule='zigzag' is unknown; use one of {list(SCHEDULES)} (or csv:FILE)"]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            ["--kernels.compile=blocks"],
            "kernels.compile=blocks makes gradients of weights and of inputs at once, and the",
        ),
        (["--layout.tp=2", "--layout.tp_overlap=true"], "tp_overlap beside schedule=zb-h1: gradients of weights hide"),
    ],
)
def test_what_cannot_put_gradients_off_is_refused_beside_backwards_in_two_parts(settings, problem):
    config = load_config("configs/debug.toml", ["--layout.pp=2", "--layout.schedule=zb-h1", *settings])
    with pytest.raises(InvalidLayout, match=problem):
        check_layout(config, 8)
    plain = load_config("configs/debug.toml", ["--layout.pp=2", "--layout.schedule=1f1b", *settings])
    check_layout(plain, 8)


def test_auto_compiles_nothing_beside_backwards_in_two_parts():
    scenario = replace(SCENARIO, engine=find_engine("dtlayout", "h100-80g-sxm"))
    whole, split = (engine_kernels(scenario, OpenKernels(), Layout(pp=2, schedule=name)) for name in ("1f1b", "zb-h1"))
    assert (whole.compile, split.compile) == ("blocks", "none")


def test_a_dry_run_folds_only_what_is_known_to_repeat():
    batch = Batch(global_batch=64, seq_len=8)
    assert fold(v_shaped(), batch) == batch
    with registered(replace(LATE_WEIGHTS, name="short", enough=lambda p, v: p + 2)):
        assert fold(Layout(pp=4, schedule="short"), batch).global_batch == 6
