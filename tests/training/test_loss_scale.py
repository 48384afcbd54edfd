"""The loss's factor: where it begins, falls and grows, and what a checkpoint keeps of it."""

import json
import math
from dataclasses import replace

import pytest

from dtlayout.config.loading import parse_config
from dtlayout.training.loss_scale import LossScale
from dtlayout.training.result import StepResult

FINE = StepResult(loss=1.0, grad_norm=1.0, stop_requested=False, loss_scale=8.0)
TOO_LARGE = replace(FINE, grad_norm=math.inf)


def configured(compute: str, global_batch: int = 8, **train: float) -> LossScale | None:
    tables = {
        "model": {"name": "debug"}, "batch": {"global_batch": global_batch, "seq_len": 8},
        "precision": {"compute": compute}, "train": {"steps": 1, **train},
    }  # fmt: skip
    return LossScale.of(parse_config(tables))


def test_it_begins_with_gradscalers_for_a_sequence_and_as_much_more_as_a_batch_divides_gradients():
    assert configured("bfloat16") is None and configured("float32") is None
    assert [configured("float16", size).value for size in (1, 2, 3, 8, 100)] == [2.0**k for k in (16, 17, 17, 19, 22)]
    asked = configured("float16", loss_scale=12.0, loss_scale_steps=3)
    assert (asked.value, asked.num_steps) == (12.0, 3)


def test_it_halves_at_each_overflow_down_to_one_and_doubles_after_steps_in_a_row_without():
    scale, seen = LossScale(8.0, 2), []
    for result in (TOO_LARGE, FINE, TOO_LARGE, FINE, FINE, FINE, TOO_LARGE, TOO_LARGE, TOO_LARGE, FINE, FINE):
        scale.add(result)
        seen.append(scale.value)
    assert seen == [4, 4, 2, 2, 4, 4, 2, 1, 1, 1, 2]


def test_a_loss_that_is_not_finite_leaves_it_and_a_resume_that_asks_for_fewer_steps_doubles_it_at_once():
    scale, again = LossScale(8.0, 5), LossScale(8.0, 2)
    for result in (FINE, FINE, FINE, replace(FINE, loss=math.nan)):
        scale.add(result)
    assert (scale.value, scale.num_fine) == (8.0, 3)
    again.restore(scale.to_dict())
    again.add(FINE)
    assert (again.value, again.num_fine) == (16.0, 0)


def test_json_keeps_each_bit_of_it_and_a_run_that_did_not_scale_gives_none():
    scale, again, new = LossScale(0.1 + 2**40, 5), LossScale(8.0, 5), LossScale(8.0, 5)
    for _ in range(3):
        scale.add(FINE)
    again.restore(json.loads(json.dumps(scale.to_dict())))
    new.restore({})
    assert (again.value, again.num_fine) == (scale.value, 3) and (new.value, new.num_fine) == (8.0, 0)


@pytest.mark.parametrize(
    ("change", "overflows"),
    [
        ({}, True), ({"grad_norm": math.nan}, True), ({"loss": math.nan}, False), ({"loss_scale": 1.0}, False),
        ({"loss_scale": None}, False), ({"grad_norm": 1.0}, False),
    ],
)  # fmt: skip
def test_only_gradients_that_a_smaller_factor_may_mend_overflow(change, overflows):
    assert replace(TOO_LARGE, **change).overflows == overflows
