"""Refusals: a line names the first repairs that work, and words where there is nothing to try."""

import pytest

from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.base.refusals import Refusal, describe, refuse, show_value


def test_only_repairs_that_end_the_problem_and_start_no_other_are_named():
    left = {1: ["odd"], 2: [], 4: ["large"], 6: [], 8: [], 10: []}

    def find_again(changes):
        return [Refusal(rule, "") for rule in left[changes["size"]]]

    odd = Refusal("odd", "size=3 is odd", ({"size": size} for size in left))
    assert describe([odd], find_again) == ["size=3 is odd; use size=2 or size=6"], "and no more than two of a kind"
    both = [Refusal("odd", "odd", [{"size": 4}]), Refusal("large", "large", [{"size": 1}])]
    assert describe(both, find_again) == ["odd; use size=4", "large; use size=1"], "the other problem was there before"


def test_repairs_of_another_kind_come_before_a_third_of_the_same():
    repairs = [*({"a": value} for value in (1, 2, 3)), {"b": True, "c": (1, 2)}]
    assert describe([Refusal("rule", "no", repairs)]) == ["no; use a=1 or a=2 or b=true with c=[1,2]"]


def test_advice_in_words_is_said_as_it_is_and_none_is_said_where_there_is_none():
    refusals = [
        Refusal("a", "a=1 is unknown", "use one of [2, 3]"),
        Refusal("b", "b must be even"),
        Refusal("c", "c", ()),
    ]
    expected = ["a=1 is unknown; use one of [2, 3]", "b must be even", "c; no change of one setting mends it"]
    assert describe(refusals) == expected
    with pytest.raises(InvalidLayout) as caught:
        refuse(refusals, InvalidLayout)
    assert caught.value.problems == expected
    with pytest.raises(InvalidConfig):
        refuse(refusals)
    refuse([])


def test_values_are_shown_as_overrides_take_them():
    assert [show_value(value) for value in (True, (3, 4), "full", 2)] == ["true", "[3,4]", "full", "2"]
