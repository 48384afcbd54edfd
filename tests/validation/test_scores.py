"""Each score against a value computed by hand, and Kendall's tau-b against scipy's."""

import random
from dataclasses import asdict, replace

import pytest
from scipy.stats import kendalltau
from scored import GPU, predict

from dtlayout.records.intervals import Interval
from dtlayout.validation.scores import GROUPINGS, by_group, by_table, kendall_tau_b, score, score_group


def test_fit_is_the_mean_of_the_shares_that_are_right_among_ok_and_among_oom():
    rows = [predict("ok", 0.4, fits=fits) for fits in (True, True, True, False)]
    rows += [predict("oom", fits=fits) for fits in (True, False)]
    assert score(rows).fit == (3 / 4 + 1 / 2) / 2


def test_fit_needs_both_outcomes_and_crashes_are_neither():
    crashed = [predict("crashed_or_oom", fits=False), predict("crashed"), predict("skipped")]
    assert score([predict("ok", 0.4), *crashed]).fit is None
    assert score([predict("oom"), *crashed]).fit is None


def test_mfu_errors_are_shares_of_the_measured_one_and_slow_runs_are_left_out():
    rows = [
        predict("ok", 0.4, 0.5),  # + 25 %
        predict("ok", 0.5, 0.4),  # - 20 %
        predict("ok", 0.05, 0.05),  # 0
        predict("ok", 0.049, 0.4),  # stalled
        predict("oom", None, 0.4),
        predict("ok", None, 0.4),  # the table does not say
    ]
    found = score(rows)
    assert found.mape == pytest.approx(0.15)
    assert found.median_ape == pytest.approx(0.20)
    assert found.rows == 6


def test_tau_is_over_all_that_ran_in_each_table_and_the_mean_of_tables():
    right = [predict("ok", mfu, mfu + 0.1, table="right") for mfu in (0.01, 0.3, 0.5)]
    wrong = [predict("ok", mfu, 1 - mfu, table="wrong") for mfu in (0.3, 0.5)]
    constant = [predict("ok", mfu, 0.4, table="constant") for mfu in (0.3, 0.5)]
    assert score(right).tau == 1.0
    assert score(wrong).tau == -1.0
    assert score(constant).tau is None
    assert score([*right, *wrong, *constant]).tau == 0.0


def test_top1_is_what_the_recommended_layout_reached_of_the_best():
    rows = [predict("ok", 0.5, 0.40), predict("ok", 0.4, 0.45), predict("ok", 0.1, 0.90, fits=False)]
    assert score(rows).top1 == pytest.approx(0.4 / 0.5)
    assert score([*rows, predict("oom", None, 0.46)]).top1 == 0.0
    assert score([*rows, predict("crashed_or_oom", None, 0.46)]).top1 == 0.0
    assert score([*rows, predict("unavailable", None, 0.46)]).top1 == pytest.approx(0.8)
    elsewhere = predict("ok", 0.3, 0.3, table="other")
    assert score([*rows, elsewhere]).top1 == pytest.approx((0.8 + 1.0) / 2)


def test_top1_is_none_where_nothing_ran_or_nothing_is_predicted_to_fit():
    assert score([predict("oom")]).top1 is None
    assert score([predict("ok", 0.5, fits=False)]).top1 is None


def test_memory_is_the_median_error_of_the_first_pipeline_rank():
    rows = [predict("ok", 0.4, peaks=(measured, (10.0, 99.0))) for measured in (8.0, 10.0, 20.0)]
    assert score(rows).memory == 0.25  # of 0.25, 0 and 0.5
    assert score([predict("ok", 0.4), predict("oom", peaks=(1.0, (10.0,)))]).memory is None


def test_false_oom_is_the_share_of_what_ran_that_is_predicted_not_to_fit():
    rows = [predict("ok", 0.4, fits=fits) for fits in (True, False, True, True)]
    assert score([*rows, predict("oom", fits=False)]).false_oom == 0.25
    open_row = predict("ok", 0.4, fits=False)
    untold = replace(open_row, run=replace(open_row.run, tells_memory=False))
    assert score([*rows, untold]).false_oom == 0.25
    assert score([predict("oom", fits=False)]).false_oom is None


def test_no_rows_have_no_scores():
    assert asdict(score([])) == {
        "fit": None, "mape": None, "median_ape": None, "tau": None, "top1": None, "memory": None, "false_oom": None,
        "rows": 0,
    }  # fmt: skip


def test_tables_keep_the_order_in_which_they_come_first():
    rows = [predict(table=table) for table in ("b", "a", "b")]
    assert {table: len(found) for table, found in by_table(rows).items()} == {"b": 2, "a": 1}
    assert list(by_table(rows)) == ["b", "a"]


def test_a_groups_errors_are_signed_and_absolute_medians():
    rows = [predict("ok", 0.5, speed, peaks=(peak, (10.0,))) for speed, peak in ((0.4, 8.0), (0.45, 12.5), (0.6, None))]
    halves = {name: Interval(0.75, 1.0, "known", "these", 20) for name in ("step_time", "peak_memory")}
    found = score_group([replace(row, own_intervals=halves) for row in [*rows, predict("oom")]])
    assert found.rows == 4
    speed, memory = asdict(found.speed), asdict(found.memory)
    assert (speed.pop("inside"), memory.pop("inside")) == (pytest.approx(2 / 3), 0.5)
    assert speed == pytest.approx({"rows": 3, "signed": -0.1, "absolute": 0.2})
    assert memory == pytest.approx({"rows": 2, "signed": 0.025, "absolute": 0.225})
    nothing = {"rows": 0, "signed": None, "absolute": None, "inside": None}
    assert asdict(score_group([])) == {"rows": 0, "speed": nothing, "memory": nothing}


def test_rows_are_grouped_by_engine_gpu_precision_and_source():
    rows = [predict("ok", 0.4), predict("oom")]
    stated = replace(rows[1], run=replace(rows[1].run, source="a page"))
    groups = by_group([rows[0], stated])
    assert groups.keys() == GROUPINGS.keys()
    assert groups["engine"] == {"megatron": [rows[0], stated]} and list(groups["gpu"]) == [GPU.name]
    assert list(groups["engine on gpu"]) == [f"megatron on {GPU.name}"] and list(groups["precision"]) == ["bfloat16"]
    assert groups["source"] == {"not stated": [rows[0]], "a page": [stated]}


@pytest.mark.parametrize("seed", range(20))
def test_tau_b_is_that_of_scipy_also_with_ties(seed):
    chance = random.Random(seed)
    x, y = ([chance.randrange(chance.choice((3, 50))) for _ in range(30)] for _ in range(2))
    assert kendall_tau_b(x, y) == pytest.approx(kendalltau(x, y).statistic, abs=1e-12)


def test_tau_b_of_a_constant_is_none():
    assert kendall_tau_b([1, 1], [1, 2]) is None
    assert kendall_tau_b([1, 2], [1, 1]) is None
    assert kendall_tau_b([], []) is None
    assert kendall_tau_b([1], [1]) is None
