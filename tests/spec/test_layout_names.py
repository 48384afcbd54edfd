"""A layout that was printed can be read again, and choices set nothing that they do not name."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.refusals import show_value
from dtlayout.planner.choices import parse_choices
from dtlayout.spec.layout import Layout

VALUES = {
    "pp": (1, 2, 8), "dp_replicate": (1, 4), "dp_shard": (1, 16), "cp": (1, 2), "tp": (1, 4), "ep": (1, 8),
    "cp_method": ("ring", "gather", "all-to-all"), "ep_dispatcher": ("alltoall", "deepep"),
    "sequence_parallel": (True, False), "tp_overlap": (True, False), "ep_overlap": (True, False),
    "micro_batch": (1, 3), "schedule": ("1f1b", "gpipe", "interleaved-1f1b"), "virtual_stages": (1, 3),
    "zero": (1, 2, 3), "recompute": ("none", "full", "every-4", "keep-attention"),
    "offload": ("none", "activations", "optimizer", "both", "disk"), "stage_layers": ((), (3, 5), (0, 12, 1)),
}  # fmt: skip
FIELDS = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in VALUES.items()})
SHORT = {"dp_shard": "dp", "dp_replicate": "replicate", "micro_batch": "mb", "virtual_stages": "v"}


def without_idle(layout):
    """A layout with the default of each field that has no effect beside the others."""
    idle = {}
    if layout.pp == 1:
        idle |= {"schedule": "1f1b", "virtual_stages": 1, "stage_layers": ()}
    idle |= {"cp_method": "ring"} if layout.cp == 1 else {}
    idle |= {"sequence_parallel": True} if layout.tp == 1 else {}
    idle |= {"tp_overlap": layout.overlaps_tp}
    return replace(layout, **idle, **({"ep_overlap": False, "ep_dispatcher": "alltoall"} if layout.ep == 1 else {}))


@settings(deadline=None)
@given(FIELDS)
def test_every_printed_layout_reads_as_itself(fields):
    layout = without_idle(Layout(**fields))
    for text in (str(layout), str(layout).replace("·", " * "), f"  {layout} "):
        assert Layout(**Layout.read(text)) == layout
        assert parse_choices(text) == Layout.read(text)
        assert parse_choices(f"{text} loss linear sdpa-flash").items() >= Layout.read(text).items()


@settings(deadline=None)
@given(FIELDS, st.sets(st.sampled_from(list(VALUES)), min_size=1), st.sampled_from([",", ", ", " ", "·"]))
def test_choices_set_what_they_name_and_nothing_else(fields, names, between):
    choices = {name: fields[name] for name in sorted(names)}
    words = [f"{SHORT.get(name, name)}={show_value(value)}" for name, value in choices.items()]
    assert parse_choices(between.join(words)) == Layout.read(between.join(words)) == choices


@pytest.mark.parametrize(
    "text",
    [
        "tp=4,pp=4,mb=2,zero=3", "tp=4,pp=4,micro_batch=2,zero=3", "tp=2,mb=1,zero=3", "mb2,zero3", "mb2 zero3",
        "tp4,mb2,zero3", "pp2·tp4+sp mb1 zero1", "mb1 zero1 tp4", "tp4 mb1 zero1, recompute=full", "tp4 mb1 zero1 pp2",
    ],
)  # fmt: skip
def test_choices_of_micro_batch_and_zero_are_no_whole_name(text):
    read = Layout.read(text)
    assert len(read) == len(text.replace("+sp", " sp").replace("·", " ").replace(",", " ").split())


def test_a_part_of_a_name_sets_no_more_than_it_says():
    assert Layout.read("dp128") == Layout.read("dp=128") == {"dp_shard": 128}
    assert Layout.read("pp8·dp2·tp4") == {"pp": 8, "dp_shard": 2, "tp": 4}


def test_a_whole_name_also_says_what_is_off():
    read = Layout.read("dp8 mb1 zero3")
    assert (read["pp"], read["tp"], read["recompute"], read["stage_layers"]) == (1, 1, "none", ())


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("quick", "'quick' is no choice; write a layout as it is printed"),
        ("xyz=2", "layout.xyz is unknown; known: "),
        ("tp=two", "layout.tp='two' must be a whole number"),
        ("tp0", "layout.tp=0 must be at least 1"),
        ("tp2·tp4", "tp4 and tp2: say one of them"),
    ],
)
def test_what_is_no_name_is_refused(name, problem):
    with pytest.raises(InvalidConfig) as caught:
        Layout.read(name)
    assert str(caught.value).startswith(problem)
