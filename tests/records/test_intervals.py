"""Each prediction takes the interval of the nearest kind of rows, and the shipped ones are whole."""

from dataclasses import replace
from math import inf

import pytest

from dtlayout.costmodel.engine import find_engine_on, known_engines
from dtlayout.costmodel.scenario import Scenario
from dtlayout.records.intervals import (
    COVERED,
    KINDS,
    KNOWN,
    NEW_ENGINE,
    NEW_GPU,
    NEW_NODES,
    NEW_SITE,
    QUANTITIES,
    SAME,
    PairOrder,
    find_intervals,
    find_least_apart,
    find_order,
    look_up,
    read_errors,
)
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.model_shape import ModelShape

MODEL = ModelShape(
    name="m", hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, ffn_size=64, vocab_size=64
)  # fmt: skip


def make_scenario(engine: str, gpu: str, **changes) -> Scenario:
    known = replace(find_gpu(gpu), **changes)
    return Scenario(
        model=MODEL, batch=Batch(global_batch=8, seq_len=8), engine=find_engine_on(engine, known),
        cluster=Cluster(gpu=known, num_gpus=8, gpus_per_node=8),
    )  # fmt: skip


def entry(kind: str, low: float, high: float = 2.0, **keys) -> dict:
    return {"kind": kind, **keys, "rows": 20, "low": low, "high": high}


FACTS = {"engine": "e", "gpu": "g", "precision": "p", "model": "m"}
ENTRIES = [
    entry(KNOWN, 0.9, 1.1, **FACTS), entry(NEW_NODES, 0.8, 1.2), entry(NEW_NODES, 0.5, 1.5, engine="f"),
    entry(NEW_SITE, 0.7, 1.4), entry(NEW_SITE, 0.95, 1.05, model="other"), entry(NEW_GPU, 0.6, 1.3),
    entry(NEW_ENGINE, 0.4, 3.0),
]  # fmt: skip
ERRORS = {
    "step_time": ENTRIES, "peak_memory": ENTRIES,
    "seen": [{**FACTS, "site": "lab", "nodes": 4}, {**FACTS, "gpu": "slow", "site": "lab", "nodes": 16}],
}  # fmt: skip


def find(site: str = "lab", nodes: int = 4, **changes: str):
    return look_up(ERRORS, FACTS | changes, site, nodes)


@pytest.mark.parametrize(
    ("changes", "kind", "low", "high"),
    [
        ({}, "known", 0.9, 1.1),
        ({"nodes": 5}, "new nodes", 0.8, 1.2),
        ({"nodes": 16}, "new nodes", 0.8**2, 1.2**2),  # two doublings
        ({"site": "home"}, "new site", 0.7, 1.4),
        ({"site": "home", "nodes": 8}, "new site and new nodes", 0.7, 1.4),
        ({"gpu": "other"}, "new GPU", 0.6, 1.3),
        ({"precision": "other"}, "new GPU", 0.6, 1.3),
        ({"model": "other", "site": "home"}, "new GPU and new site", 0.6, 1.3),  # a range of such models goes first
        ({"engine": "f", "site": "home", "nodes": 99}, "new engine", 0.4, 3.0),
    ],
)
def test_whatever_is_new_widens_the_range(changes, kind, low, high):
    found = find(**changes)["step_time"]
    assert (found.kind, found.low, found.high) == (kind, pytest.approx(low), pytest.approx(high))
    assert found.is_foreign == (kind == "new engine")


def test_a_peaks_range_is_widened_once_however_many_more_nodes_there_are():
    few, many = (find(nodes=nodes)["peak_memory"] for nodes in (8, 64))
    assert few == many and few.kind == "new nodes" and few.high > find()["peak_memory"].high


def test_a_range_says_which_rows_it_rests_on():
    assert find()["step_time"].basis == "90% of 20 rows of e on g in p, m, by fits to other models"
    assert find(site="home")["step_time"].basis == "90% of 20 rows of sites that no fit had seen"
    both = find(site="home", nodes=8)["step_time"]
    assert both.basis == "90% of 40 rows of sites that no fit had seen and more nodes than fits had seen"


def test_a_quantity_that_no_rows_stand_behind_has_no_interval():
    assert look_up({"step_time": [], "peak_memory": [], "seen": []}, FACTS, "lab", 1) == {}
    without = [each for each in ENTRIES if each["kind"] != KNOWN]
    few = look_up({"step_time": without, "peak_memory": without, "seen": ERRORS["seen"]}, FACTS, "lab", 1)
    assert few["step_time"].kind == "new GPU"  # too few known rows are as good as none


def test_an_interval_is_a_range_around_what_is_predicted():
    found = find_intervals(make_scenario("nanotron", "h100-80g-sxm")).step_time
    assert found.around(10.0) == (10 * found.low, 10 * found.high)
    assert found.holds(found.low) and found.holds(1.0) and not found.holds(found.high * 1.001)


@pytest.mark.parametrize("gpu", ["a100-80g-sxm", "h100-80g-sxm", "cpu"])
def test_every_engine_has_intervals_on_every_gpu_type(gpu):
    for engine in known_engines():
        found = find_intervals(make_scenario(engine, gpu))
        assert all(0 < interval.low < interval.high and interval.rows >= 9 for interval in found)


def test_the_shipped_intervals_are_of_known_kinds_and_hold_all_quantities():
    errors, bounds = read_errors(), ("low", "upper_quartile", "high")
    assert errors.keys() == {"source", "order", "seen", *QUANTITIES}
    for quantity in QUANTITIES:
        for found in errors[quantity]:
            keys = found.keys() - {"kind", "rows", *bounds}
            assert 0 < found["low"] <= found["upper_quartile"] <= found["high"]
            assert keys == {*SAME} if found["kind"] == KNOWN else keys <= {"engine", "model"}
        assert {found["kind"] for found in errors[quantity]} == set(KINDS)
    assert all(row.keys() == {*SAME, "site", "nodes"} for row in errors["seen"])


def test_both_sweeps_are_known_where_they_ran_and_our_own_trainer_is_new():
    sweeps = {"aa": make_scenario("aa-scaling", "a100-80g-sxm"), "playbook": make_scenario("nanotron", "h100-80g-sxm")}
    for site, scenario in sweeps.items():
        assert find_intervals(scenario, site).step_time.kind == "known"
        assert find_intervals(scenario).step_time.kind == "new site"  # that of whoever asks
    own = find_intervals(make_scenario("dtlayout", "h100-80g-sxm")).step_time
    assert own.kind == "new engine" and own.is_foreign


def test_machines_with_a_record_have_the_errors_of_their_own_steps():
    achieved = (("layer_host_s", 1e-3),)
    measured = make_scenario("dtlayout", "cpu", achieved=achieved, prediction_error=0.25)
    step, peak = find_intervals(measured)
    assert (step.low, step.high, step.covered) == (pytest.approx(1 / 1.25), pytest.approx(1 / 0.75), 0.5)
    assert step.basis == "50% of the steps of the last sweep on these machines"
    assert peak == find_intervals(make_scenario("dtlayout", "cpu")).peak_memory
    without = make_scenario("dtlayout", "cpu", achieved=achieved)
    assert find_intervals(without).step_time.kind == "new engine"
    other = make_scenario("megatron", "cpu", prediction_error=0.25)
    assert find_intervals(other).step_time.kind != "record"


def test_layouts_are_apart_from_where_on_nine_of_ten_pairs_came_in_order():
    orders = [
        PairOrder(0.0, 10, 5),
        PairOrder(0.01, 10, 9),
        PairOrder(0.02, 10, 8),
        PairOrder(0.05, 10, 9),
        PairOrder(0.1, 0, 0),
    ]
    assert find_least_apart(orders) == 0.05
    assert find_least_apart(orders[:1]) == inf
    assert find_least_apart(orders[1:2]) == 0.01


def test_pairs_that_were_predicted_further_apart_came_in_order_more_often():
    for engine in ("aa-scaling", "dtlayout"):
        orders = find_order(engine)
        shares = [order.right / order.pairs for order in orders]
        assert [order.least for order in orders] == sorted(order.least for order in orders)
        assert shares[0] < 0.7 and shares[-1] > COVERED
    assert sum(order.pairs for order in find_order("aa-scaling")) < sum(order.pairs for order in find_order("dtlayout"))


def test_the_shipped_ranges_are_those_of_the_rules_that_make_them():
    """Of fewer than 24 known rows the largest error stands for either side."""
    errors = read_errors()
    entries = [entry for quantity in QUANTITIES for entry in errors[quantity] if entry["kind"] == KNOWN]
    assert len(entries) > 15 and {entry["rows"] < 24 for entry in entries} == {True, False}
    for entry in entries:
        is_symmetric = entry["low"] * entry["high"] == pytest.approx(1, abs=2e-3)
        assert is_symmetric == (entry["rows"] < 24), entry
