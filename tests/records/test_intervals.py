"""Each prediction takes the interval of the nearest kind of rows, and the shipped ones are whole."""

from dataclasses import replace
from math import inf

import pytest

from dtlayout.costmodel.engine import find_engine_on, known_engines
from dtlayout.costmodel.scenario import Scenario
from dtlayout.records.intervals import (
    COVERED,
    KINDS,
    QUANTITIES,
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


def entry(kind: str, low: float, **keys) -> dict:
    return {"kind": kind, **keys, "rows": 20, "low": low, "high": 2.0}


ERRORS = {
    "step_time": [
        entry("known", 0.1, engine="e", gpu="g", precision="p", model="m"),
        entry("new GPU", 0.2, engine="e", precision="p", model="m"),
        entry("new precision", 0.3, engine="e", model="m"), entry("new engine", 0.4),
    ],
    "peak_memory": [entry("new engine", 0.5)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("scenario", "low", "kind", "like"),
    [
        (("e", "g", "p", "m"), 0.1, "known", "e on g in p, m, by fits to other models"),
        (("e", "other", "p", "m"), 0.2, "new GPU", "e in p, m, by fits to other GPU types"),
        (("e", "g", "other", "m"), 0.3, "new precision", "e, m, by fits to other GPU types"),
        (("e", "g", "p", "other"), 0.4, "new engine", "all engines, fitted to none of them"),
        (("f", "g", "p", "m"), 0.4, "new engine", "all engines, fitted to none of them"),
    ],
)
def test_the_nearest_kind_of_rows_gives_the_interval(scenario, low, kind, like):
    found = look_up(ERRORS, dict(zip(("engine", "gpu", "precision", "model"), scenario, strict=True)))
    assert (found["step_time"].low, found["step_time"].kind, found["step_time"].like) == (low, kind, like)
    assert found["peak_memory"].low == 0.5
    assert found["step_time"].basis == f"90% of 20 rows of {like}"


def test_a_quantity_that_no_rows_stand_behind_has_no_interval():
    assert (
        look_up({"step_time": [], "peak_memory": []}, {"engine": "e", "gpu": "g", "precision": "p", "model": "m"}) == {}
    )


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
    errors = read_errors()
    assert errors.keys() == {"source", "order", *QUANTITIES}
    for quantity in QUANTITIES:
        kinds = {kind.name: kind for kind in KINDS}
        for found in errors[quantity]:
            assert found.keys() == {"kind", "rows", "low", "high", *kinds[found["kind"]].keys}
        assert KINDS[-1].name in {found["kind"] for found in errors[quantity]}


def test_both_sweeps_are_known_and_our_own_trainer_is_new():
    assert find_intervals(make_scenario("aa-scaling", "a100-80g-sxm")).step_time.kind == "known"
    assert find_intervals(make_scenario("nanotron", "h100-80g-sxm")).peak_memory.kind == "known"
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
    """Of fewer than 24 rows the largest error stands for either side."""
    errors = read_errors()
    entries = [entry for quantity in QUANTITIES for entry in errors[quantity]]
    assert len(entries) > 20 and {entry["rows"] < 24 for entry in entries} == {True, False}
    for entry in entries:
        is_symmetric = entry["low"] * entry["high"] == pytest.approx(1, abs=2e-3)
        assert is_symmetric == (entry["rows"] < 24), entry
