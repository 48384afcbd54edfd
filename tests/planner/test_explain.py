"""What binds a layout, and changes that keep the world, are legal, and do what is promised of them."""

from dataclasses import replace

import pytest

from dtlayout.config.checking import check_layout
from dtlayout.config.loading import parse_config
from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.estimate import Estimator, estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.counting import count_parameters
from dtlayout.models.presets import PRESETS
from dtlayout.planner.explain import (
    LEAST_GAIN,
    MOST_CHANGES,
    MOST_GPUS,
    Explanation,
    explain,
    find_overrides,
)
from dtlayout.planner.neighbours import find_moves
from dtlayout.planner.space import KERNEL_NAMES
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import Precision


def make_scenario(model="llama-13b", global_batch=512, seq_len=2048, num_gpus=64, precision=None) -> Scenario:
    gpu = find_gpu("a100-80g-sxm")
    return Scenario(
        model=PRESETS[model], batch=Batch(global_batch=global_batch, seq_len=seq_len),
        precision=precision or Precision(),
        cluster=Cluster(gpu=gpu, num_gpus=num_gpus, gpus_per_node=8), engine=find_engine("dtlayout", gpu.name),
    )  # fmt: skip


SLOW = Layout(pp=8, tp=8, sequence_parallel=False, micro_batch=1, recompute="full")
"""Of 64 GPUs, and worse than need be in most ways, but it fits."""
TOO_LARGE = Layout(dp_shard=64, micro_batch=8, zero=3)
"""Fits with less of something."""
HOPELESS = Layout(dp_shard=2, micro_batch=1)
"""No change helps 2 GPUs of whose host nothing is known."""


def without_host(scenario: Scenario) -> Scenario:
    """GPUs in a server of which nobody knows how much it has."""
    gpu = replace(scenario.cluster.gpu, host_link_bytes_per_s=None)
    return replace(scenario, cluster=replace(scenario.cluster, gpu=gpu))


@pytest.fixture(scope="module")
def slow() -> Explanation:
    return explain(make_scenario(), SLOW, Kernels(norm="eager"))


@pytest.fixture(scope="module")
def too_large() -> Explanation:
    return explain(make_scenario(), TOO_LARGE, Kernels())


def test_a_layout_that_fits_is_bound_by_what_most_of_its_step_is_spent_on(slow):
    time = slow.estimate.time.as_dict()
    assert slow.estimate.fits
    assert slow.limit.kind == "time" and slow.limit.pipeline_rank is None
    assert time[slow.limit.component] == max(time.values())
    assert slow.limit.share == pytest.approx(time[slow.limit.component] / slow.estimate.step_time_s)


def test_a_layout_that_does_not_fit_is_bound_by_the_largest_component_of_the_fullest_rank(too_large):
    fullest = too_large.estimate.memory[too_large.limit.pipeline_rank]
    assert not too_large.estimate.fits and too_large.limit.kind == "memory"
    assert fullest.total == too_large.estimate.peak_bytes
    assert too_large.limit.component == "activations" == max(vars(fullest), key=vars(fullest).__getitem__)
    assert too_large.limit.share == pytest.approx(fullest.activations / fullest.total)


@pytest.mark.parametrize("name", ["slow", "too_large"])
def test_changes_are_legal_fit_keep_the_world_and_reach_what_is_promised(name, request):
    found, scenario = request.getfixturevalue(name), make_scenario()
    assert 0 < len(found.changes) <= MOST_CHANGES and found.growth is None
    assert len({change.knob for change in found.changes}) == len(found.changes)
    for change in found.changes:
        after = change.estimate
        assert after == estimate(scenario, after.layout, after.kernels)
        assert after.fits and after.layout.world_size == found.estimate.layout.world_size
        assert after.layout.is_legal(scenario.model, scenario.batch)
        assert (after.layout == found.estimate.layout) == (change.knob in KERNEL_NAMES)


def test_changes_come_fastest_first_and_where_a_layout_fits_all_are_faster(slow, too_large):
    for found in (slow, too_large):
        times = [change.estimate.step_time_s for change in found.changes]
        assert times == sorted(times)
    limit_s = (1 - LEAST_GAIN) * slow.estimate.step_time_s
    assert all(change.estimate.step_time_s < limit_s for change in slow.changes)
    assert {"recompute", "tp"} <= {change.knob for change in slow.changes}
    assert {"micro_batch", "recompute"} <= {change.knob for change in too_large.changes}


def test_the_fastest_change_of_a_fast_layout_finds_the_first_one_no_better(slow):
    best = slow.changes[0]
    again = explain(make_scenario(), best.estimate.layout, best.estimate.kernels)
    assert all(change.estimate.step_time_s < best.estimate.step_time_s for change in again.changes)


def test_overrides_make_the_changed_layout_of_the_config(slow):
    tables = {
        "model": {"name": "llama-13b"}, "batch": {"global_batch": 512, "seq_len": 2048}, "train": {"steps": 1},
        "layout": {"pp": 8, "tp": 8, "sequence_parallel": False, "recompute": "full"}, "kernels": {"norm": "eager"},
    }  # fmt: skip
    for change in slow.changes:
        changed = {section: dict(table) for section, table in tables.items()}
        for override in change.overrides:
            key, _, text = override.removeprefix("--").partition("=")
            section, _, name = key.partition(".")
            value = {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)
            changed[section][name] = value
        config = parse_config(changed)
        assert check_layout(config, 64) == change.estimate.layout
        assert config.kernels.or_else(Kernels()) == change.estimate.kernels


def test_overrides_name_what_differs_as_toml_writes_it():
    old = Layout(pp=2, stage_layers=(1, 3), tp=2), Kernels()
    new = Layout(pp=2, tp=2, sequence_parallel=False, recompute="every-2"), Kernels(norm="eager")
    assert find_overrides(old, old) == ()
    assert find_overrides(old, new) == (
        "--layout.sequence_parallel=false", "--layout.stage_layers=[]", "--layout.recompute=every-2",
        "--kernels.norm=eager",
    )  # fmt: skip


def test_moves_keep_the_world_and_a_pipeline_that_ends_loses_its_schedule_and_its_split():
    layout = Layout(
        pp=2, dp_shard=4, tp=2, schedule="interleaved-1f1b", virtual_stages=2, stage_layers=(10, 10, 10, 10)
    )  # fmt: skip
    moves = list(find_moves(layout, Batch(global_batch=64, seq_len=128), 40))
    assert {moved.world_size for _, moved in moves} == {16}
    for _, moved in moves:
        if moved.pp == 1:
            assert (moved.schedule, moved.virtual_stages) == ("1f1b", 1)
        if moved.num_stages != 4:
            assert moved.stage_layers == ()
    knobs = {knob for knob, _ in moves}
    assert knobs == {
        "tp", "pp", "cp", "dp_replicate", "micro_batch", "zero", "recompute", "sequence_parallel", "tp_overlap",
        "stage_layers", "schedule", "offload",
    }  # fmt: skip


def test_kernels_that_cannot_compute_in_the_precision_are_not_advised():
    scenario = make_scenario(precision=Precision(compute="float32"))
    slow_kernels = Kernels(attention="sdpa-math", norm="eager")
    found = explain(scenario, SLOW, slow_kernels)
    assert {change.estimate.kernels.attention for change in found.changes} == {"sdpa-math"}


def test_where_nothing_single_fits_the_fewest_gpus_that_would_are_found():
    scenario = without_host(make_scenario(num_gpus=2))
    found = explain(scenario, HOPELESS, Kernels())
    assert not found.estimate.fits and found.changes == ()
    growth = found.growth
    assert growth.estimate.fits and growth.estimate.layout.is_legal(scenario.model, scenario.batch)
    factor, left = divmod(growth.estimate.layout.world_size, HOPELESS.world_size)
    assert left == 0 and factor & (factor - 1) == 0 and factor > 1
    half = [
        Layout(tp=tp, pp=pp, dp_shard=HOPELESS.world_size * factor // 2 // tp // pp, zero=zero, recompute=recompute)
        for tp in (1, 2, 4) for pp in (1, 2, 4) for zero in (1, 2, 3) for recompute in ("none", "full")
        if HOPELESS.world_size * factor // 2 % (tp * pp) == 0
    ]  # fmt: skip
    estimator = Estimator(scenario)
    doubled = [layout for layout in half if layout.dp_shard >= HOPELESS.dp_shard]
    assert doubled and not any(estimator.estimate(layout, Kernels()).fits for layout in doubled)


def test_where_memory_of_the_host_helps_it_is_offered_with_what_it_takes():
    scenario = make_scenario(num_gpus=2)
    found = explain(scenario, HOPELESS, Kernels())
    (change,) = found.changes
    offloaded = change.estimate
    assert change.overrides == ("--layout.offload=both",) and offloaded.fits and found.growth is None
    n = count_parameters(scenario.model)
    assert offloaded.host_bytes[0] > (4 + 4 + 4 + 4) * n / 2  # fp32 masters, gradients and both moments of a half
    small = replace(scenario.cluster.gpu, host_memory_bytes=20 * 2**30)
    found = explain(replace(scenario, cluster=replace(scenario.cluster, gpu=small)), offloaded.layout, Kernels())
    assert not found.estimate.fits and found.limit.kind == "host memory" and found.limit.share > 1
    assert found.estimate.needed_bytes <= found.estimate.capacity_bytes


def test_copies_are_waited_for_where_the_link_is_slower_than_what_hides_them():
    layout, waited = Layout(dp_shard=64, micro_batch=4, zero=3, offload="activations"), []
    for link in (1e9, 25e9, 1e12):
        scenario = make_scenario()
        gpu = replace(scenario.cluster.gpu, host_link_bytes_per_s=link)
        found = explain(replace(scenario, cluster=replace(scenario.cluster, gpu=gpu)), layout, Kernels())
        assert found.copied_s == pytest.approx(explain(scenario, layout, Kernels()).copied_s * 25e9 / link)
        waited.append(found.waited_s / found.copied_s)
    assert 1 > waited[0] > waited[1] > waited[2] == 0


def test_more_gpus_of_a_rack_join_the_links_of_those_that_are_there():
    gpu = find_gpu("gb200")
    rack = Cluster(gpu=gpu, num_gpus=4, gpus_per_node=4)
    scenario = replace(make_scenario("llama3.1-405b"), cluster=rack, engine=find_engine("dtlayout", gpu.name))
    growth = explain(scenario, Layout(tp=4, micro_batch=1), Kernels()).growth
    layout = growth.estimate.layout
    larger = replace(scenario, cluster=replace(rack, num_gpus=layout.world_size))
    assert layout.world_size > 4 and growth.estimate == estimate(larger, layout, Kernels())
    assert growth.estimate.step_time_s < estimate(scenario, layout, Kernels()).step_time_s


def test_where_no_number_of_gpus_would_do_none_is_named():
    tiny_gpu = replace(find_gpu("a100-80g-sxm"), memory_bytes=3 * 10**9)
    scenario = make_scenario(model="llama3.1-405b", seq_len=131072)
    scenario = replace(scenario, cluster=Cluster(gpu=tiny_gpu, num_gpus=MOST_GPUS // 4, gpus_per_node=8))
    found = explain(scenario, Layout(dp_shard=8, pp=2, tp=8), Kernels())
    assert found.changes == () and found.growth is None
