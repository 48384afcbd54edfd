"""Trees: the values of YAML, JSON and TOML, references, and texts in which nothing but a value changes."""

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig
from dtlayout.programs.files.trees import read_tree
from dtlayout.programs.shell.script import Unknown

YAML = """# a run
model:
  name: 'llama'   # quoted
  layers: 32  # of them
  lr: 1.0e-4
parallel: {tp: 2, overlap: true}
stages:
  - [1, 2]   # first
  - [3]
list:
  - a
  - b
# the end
empty:
"""
JSON = '{\n  "zero": {"stage": "auto", "offload": {"device": "cpu"}},\n  "batch": 8,\n  "bf16": {"enabled": true}\n}\n'
TOML = '# a run\n[model]\nname = "llama"  # quoted\nlayers = 32\n\n[parallel]\ntp = 2\nstages = [1, 2]  # two\n'


def edit(text, **changes):
    return read_tree(text, {}).edit({name.replace("__", "."): value for name, value in changes.items()})


def differing(before, after):
    """Lines that only one of two texts has."""
    return [line for line in before.splitlines() if line not in after.splitlines()], [
        line for line in after.splitlines() if line not in before.splitlines()
    ]


def test_values_have_dotted_names_and_a_list_is_one_value():
    assert read_tree(YAML, {}).values == {
        "model.name": "llama", "model.layers": 32, "model.lr": 1e-4, "parallel.tp": 2, "parallel.overlap": True,
        "stages": [[1, 2], [3]], "list": ["a", "b"], "empty": None,
    }  # fmt: skip
    assert read_tree(JSON, {}).values["zero.offload.device"] == "cpu"
    assert read_tree(TOML, {}).language == "toml" and read_tree(TOML, {}).values["parallel.stages"] == [1, 2]


@pytest.mark.parametrize("text", ["", "just words", "- 1\n- 2", "a: b: c", "#!/bin/bash\necho $A", "1: 2"])
def test_a_text_without_names_is_no_tree(text):
    assert read_tree(text, {}) is None


def test_a_file_of_aliases_upon_aliases_is_refused_at_once():
    text = "a0: &a0 {x: 1, y: 2}\n" + "".join(
        f"a{n}: &a{n} {{{', '.join(f'k{i}: *a{n - 1}' for i in range(9))}}}\n" for n in range(1, 12)
    )
    with pytest.raises(InvalidConfig, match="more than 20,000 values"):
        read_tree(text, {})


@pytest.mark.parametrize(
    ("changes", "gone", "new"),
    [
        ({"model__layers": 40}, ["  layers: 32  # of them"], ["  layers: 40  # of them"]),
        ({"model__name": "qwen"}, ["  name: 'llama'   # quoted"], ["  name: 'qwen'   # quoted"]),
        ({"parallel__tp": 4}, ["parallel: {tp: 2, overlap: true}"], ["parallel: {tp: 4, overlap: true}"]),
        ({"parallel__tp": None}, ["parallel: {tp: 2, overlap: true}"], ["parallel: {overlap: true}"]),
        ({"parallel__pp": 2}, ["parallel: {tp: 2, overlap: true}"], ['parallel: {"pp": 2, tp: 2, overlap: true}']),
        ({"model__lr": None}, ["  lr: 1.0e-4"], []),
        ({"model__eps": 1e-5}, [], ["  eps: 1.0e-05"]),
        ({"new__part": "no"}, [], ["new:", '  part: "no"']),
        ({"list": ["c"]}, ["list:", "  - a", "  - b"], ['list: ["c"]']),
        ({"empty": 3}, ["empty:"], ["empty: 3"]),
    ],
)
def test_a_change_of_yaml_touches_its_own_text_alone(changes, gone, new):
    assert differing(YAML, edit(YAML, **changes)) == (gone, new)


@pytest.mark.parametrize(
    ("changes", "gone", "new"),
    [
        ({"batch": 4}, ['  "batch": 8,'], ['  "batch": 4,']),
        ({"batch": None}, ['  "batch": 8,'], []),
        ({"steps": 4}, [], ['  "steps": 4,']),
        ({"bf16__enabled": False}, ['  "bf16": {"enabled": true}'], ['  "bf16": {"enabled": false}']),
    ],
)
def test_json_is_changed_as_json(changes, gone, new):
    after = edit(JSON, **changes)
    json.loads(after)
    assert differing(JSON, after) == (gone, new)


def test_toml_is_changed_with_its_comments():
    assert differing(TOML, edit(TOML, model__layers=40, parallel__pp=2, parallel__tp=None)) == (
        ["layers = 32", "tp = 2"], ["layers = 40", "pp = 2"]
    )  # fmt: skip
    assert edit(TOML, compile__enable=True).endswith("\n[compile]\nenable = true\n")


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("a: &x {b: 1}\nc: *x\n", {"c__b": 2}),  # would change a too
        ("a:\n  - 1  # one\n  - 2\n", {"a": [3]}),  # has a comment
        ("a:\n  b: 1\n", {"a__b": None}),
    ],
)
def test_what_cannot_be_changed_alone_is_refused(text, changes):
    with pytest.raises(InvalidConfig):
        edit(text, **changes)


VALUES = st.one_of(st.integers(-9, 9), st.booleans(), st.text("abc: #'\"{}-", max_size=6), st.floats(0.1, 9.0))
NAMES = st.sampled_from(["model.name", "model.layers", "parallel.tp", "parallel.new", "model.new", "a.b.c", "empty"])


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=3))
def test_any_change_is_read_back(changes):
    for text, load in ((YAML, yaml.safe_load), (TOML, toml.loads)):
        after = read_tree(text, {}).edit(changes)
        assert load(after)
        assert read_tree(after, {}).values == {**read_tree(text, {}).values, **changes}


def test_references_are_followed_and_others_are_unknown():
    text = "a: 4\nb: {c: '${a}', d: 'x${a}', e: '${.c}'}\nf: '${oc.env:N,8}'\ng: '${oc.env:M}'\nh: '${now:%Y}'\n"
    values = read_tree(text, {}).values
    assert (values["b.c"], values["b.d"], values["b.e"], values["f"]) == (4, "x4", 4, 8)
    assert isinstance(values["g"], Unknown) and values["g"].variable == "M" and isinstance(values["h"], Unknown)
    assert read_tree(text, {"M": "16"}).values["g"] == 16
    assert isinstance(read_tree("a: ${b}\nb: ${a}\n", {}).values["a"], Unknown)  # a circle
