"""What errors of rows left out say of others: ranges that hold for nine of ten, and the order of pairs."""

import random
from dataclasses import replace
from math import exp

import pytest
from scored import predict

from dtlayout.base import toml
from dtlayout.costmodel.engine import find_engine
from dtlayout.validation.cross_validation import (
    DIFFERENCES,
    HOLD_OUT,
    AllLeftOut,
    HeldOutErrors,
    add_intervals,
    count_orders,
    find_range,
    list_seen,
    to_errors,
    to_intervals,
)
from dtlayout.validation.scores import Prediction, score_group


def rows_of(
    ratios: list[float], model: str = "m", engine: str = "megatron", peak: float | None = None, site: str = "lab"
) -> list[Prediction]:
    """Predictions whose measured step takes `ratio` times what is predicted."""
    found = [predict("ok", 0.4 / ratio, 0.4, peaks=(peak, (10.0,))) for ratio in ratios]
    named = [
        replace(p, run=replace(p.run, source=f"{site}/page", row=f"{model} {engine} {site} {i}"))
        for i, p in enumerate(found)
    ]
    return [to_model(p, model, engine) for p in named]


def left_out(**ways: dict[str, list[Prediction]]) -> AllLeftOut:
    """Predictions by group for each way, whose spaces are underlines here."""
    return AllLeftOut({name.replace("_", " "): HeldOutErrors(groups) for name, groups in ways.items()})


def to_model(prediction: Prediction, model: str, engine: str) -> Prediction:
    scenario = prediction.run.scenario
    changed = replace(
        scenario,
        model=replace(scenario.model, name=model),
        engine=find_engine(engine, scenario.engine.gpu),
    )
    return replace(prediction, run=replace(prediction.run, scenario=changed))


def range_of(ratios, engine="megatron"):
    return find_range([(ratio, engine) for ratio in ratios])


def test_nine_tenths_of_further_ratios_lie_in_the_range_whatever_their_number():
    chance = random.Random(0)
    for num_rows in (9, 15, 19, 40, 300):
        inside = []
        for _ in range(400):
            draw = [exp(chance.gauss(0.1, 0.2)) for _ in range(num_rows + 1)]
            low, high = range_of(draw[:-1])
            inside.append(low <= draw[-1] <= high)
        assert 0.87 <= sum(inside) / len(inside) <= 0.99, num_rows


def test_each_tail_holds_a_twenty_fifth_of_many_rows():
    assert range_of([1 + i / 100 for i in range(99)]) == (pytest.approx(1.03), pytest.approx(1.95))


def test_few_rows_have_their_largest_error_either_way_and_fewer_none():
    assert range_of([1.0] * 8 + [1.25]) == (pytest.approx(0.8), pytest.approx(1.25))
    assert range_of([1.0] * 8) is None


def test_no_engine_counts_for_more_because_it_has_more_rows():
    few, many = [(0.5, "few")] * 20, [(1.0, "many")] * 2000
    assert find_range([*few, *many]) == (pytest.approx(0.5), pytest.approx(1.0))


def test_kinds_of_rows_have_their_own_ranges_and_say_how_many_they_are():
    models, gpus, engines = (rows_of([ratio] * 10, peak=8.0) for ratio in (1.1, 1.2, 1.3))
    sites, nodes = ({"a": rows_of([ratio] * 10)} for ratio in (1.4, 1.5))
    everything = {"GPU_type": {"a": gpus}, "site": sites, "nodes": nodes, "engine": {"a": engines}}
    found = to_intervals(left_out(model={"m": models}, **everything))
    highs = {entry["kind"]: entry["high"] for entry in found["step_time"]}
    assert highs == {"known": 1.1, "new nodes": 1.5, "new site": 1.4, "new GPU": 1.2, "new engine": 1.3}
    assert found["step_time"][0] == {
        "kind": "known", "engine": "megatron", "gpu": "a100-80g-sxm", "precision": "bfloat16",
        "model": "dense models", "rows": 10, "low": pytest.approx(1 / 1.1, abs=1e-4), "high": 1.1,
        "upper_quartile": 1.1,
    }  # fmt: skip
    assert {entry["low"] for entry in found["peak_memory"]} == {0.8}
    few = to_intervals(left_out(model={"m": models[:8]}, **everything))
    assert "known" not in {entry["kind"] for entry in few["step_time"]}


def test_a_site_with_many_rows_makes_no_range_for_the_others():
    sites = {f"{i}": rows_of([1.0 + i / 10] * 40, site=f"{i}") for i in range(5)}
    sites["large"] = rows_of([1.0] * 4000, site="large")
    (step, *_), _ = to_intervals(left_out(site=sites)).values()
    assert (step["kind"], step["rows"], step["low"], step["high"]) == ("new site", 4200, 1.0, 1.4)


def test_a_model_that_is_left_out_has_no_part_in_its_own_interval():
    good, bad = rows_of([1.05] * 10, model="good"), rows_of([3.0] * 10, model="bad")
    evidence = left_out(model={"good": good, "bad": bad}, GPU_type={"g": [*good, *bad]})
    found = add_intervals(evidence.ways["model"], evidence)
    (high,) = {p.intervals["step_time"].high for p in found.predictions["bad"]}
    assert high == pytest.approx(1.05)
    assert score_group(found.predictions["bad"]).speed.inside == 0
    assert score_group(found.predictions["good"]).speed.inside == 1


def test_rows_that_were_left_out_are_as_new_as_the_others_leave_them():
    here, there = rows_of([1.1] * 10, site="here"), rows_of([1.3] * 10, site="there")
    evidence = left_out(model={"m": [*here, *there]}, site={"here": here, "there": there})
    found = add_intervals(evidence.ways["site"], evidence)
    for site, high in (("here", 1.3), ("there", 1.1)):
        (interval,) = {p.intervals["step_time"] for p in found.predictions[site]}
        assert (interval.kind, interval.high) == ("new site", pytest.approx(high))


def test_a_row_without_an_interval_is_neither_inside_nor_outside():
    alone = rows_of([1.05] * 10, model="alone")
    evidence = left_out(model={"alone": alone})
    (found,) = add_intervals(evidence.ways["model"], evidence).predictions.values()
    scores = score_group(found).speed
    assert (scores.rows, scores.inside) == (10, None)


def test_what_fits_have_seen_is_told_by_site_with_its_most_nodes():
    rows = rows_of([1.0], site="here") + rows_of([1.0], site="there")
    assert [(seen["engine"], seen["site"], seen["nodes"]) for seen in list_seen(p.run for p in rows)] == [
        ("megatron", site, rows[0].run.scenario.cluster.num_nodes) for site in ("here", "there")
    ]


def test_pairs_of_a_sweep_are_counted_by_how_far_apart_they_are_predicted():
    speeds = [0.3 * 1.03**i for i in range(10)]
    measured = [speeds[1], speeds[0], *speeds[2:]]  # the slowest two came the other way round
    sweep = [predict("ok", m, p) for m, p in zip(measured, speeds, strict=True)]
    orders = count_orders([*sweep, *rows_of([1.0] * 9, model="too-few")])
    assert {order.get("engine") for order in orders} == {None, "megatron"}
    pooled = {order["least"]: (order["pairs"], order["right"]) for order in orders if "engine" not in order}
    assert list(pooled) == list(DIFFERENCES)
    assert pooled[0.02] == (9, 8)
    assert sum(pairs for pairs, _ in pooled.values()) == 45 and sum(right for _, right in pooled.values()) == 44


def test_the_file_of_errors_is_toml_and_says_what_it_rests_on():
    rows = rows_of([1.05] * 10, peak=8.0) + rows_of([1.05] * 9, engine="nanotron")
    evidence = left_out(**{name.replace(" ", "_"): {"all": rows} for name in HOLD_OUT})
    text = to_errors(evidence)
    assert text.startswith("# Written by dtlayout validate --errors, never by hand")
    tables = toml.loads(text)
    assert tables["source"] == "rows left out: 10 of megatron, 9 of nanotron"
    assert tables["step_time"] == to_intervals(evidence)["step_time"]
    assert tables["seen"] == list_seen(p.run for p in rows)
