"""TOML: what is written is read again, and what is read has the types that were asked for."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlayout.base import toml
from dtlayout.base.errors import InvalidConfig

texts = st.text(st.characters(codec="utf-8"))
leaves = st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False) | texts
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=8)


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InvalidConfig(f"size={self.size} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    kind: Literal["a", 1] = "a"
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    any: dict[str, Any] = field(default_factory=dict)
    source: str = field(default="", metadata={"key": "from"})
    place: Path = Path()


@given(st.dictionaries(texts, values))
def test_what_is_written_is_read_again(tables):
    assert toml.loads(toml.dumps(tables)) == tables


def test_a_list_of_numbers_is_one_line_and_a_text_that_looks_like_one_stays():
    tables = {"a": {"b": (1, 2), "c": [], "d": ["x = [", "]", 'a"\n', "😀"], "e": None, "f": math.inf}}
    text = toml.dumps(tables)
    assert text.splitlines()[:3] == ["[a]", "b = [1, 2]", "c = []"] and len(text.splitlines()) == 5
    assert toml.loads(text) == {"a": {"b": [1, 2], "c": [], "d": tables["a"]["d"], "f": math.inf}}


def test_a_table_becomes_a_dataclass_with_those_inside_it():
    table = {"name": "n", "kind": 1, "inner": {"size": 3, "share": 1}, "many": [{"size": 1}], "from": "f", "place": "p"}
    made = toml.parse(table, Outer)
    assert made == Outer(
        name="n", kind=1, inner=Inner(size=3, share=1.0), many=(Inner(size=1),), source="f", place=Path("p")
    )
    assert made.inner is not None and type(made.inner.share) is float
    assert toml.parse({"kind": "a"}, Outer, name="given").name == "given"
    with pytest.raises(InvalidConfig, match=r"^name is unknown"):
        toml.parse({"name": "n"}, Outer, name="given")


def test_everything_that_is_wrong_is_said_at_once_and_where():
    table = {
        "kind": True, "inner": {"size": 0, "shar": 1}, "many": [{"size": 1}, {"size": True}, 3], "any": 1, "nmae": 1,
        "from": 3, "place": 4,
    }  # fmt: skip
    with pytest.raises(InvalidConfig) as caught:
        toml.parse(table, Outer, "top")
    assert caught.value.problems == [
        "top.nmae is unknown; did you mean top.name?",
        "top.name is missing",
        "top.kind=True is unknown; use one of ['a', 1]",
        "top.inner.shar is unknown; did you mean top.inner.share?",
        "size=0 must be at least 1",
        "top.many[1].size=True must be a whole number",
        "top.many[2] is a table: write [top.many[2]] with size below",
        "top.any is a table: write [top.any] and its keys below",
        "top.from=3 must be a string",
        "top.place=4 must be a path",
    ]


def test_problems_say_in_which_file_they_are(tmp_path):
    with pytest.raises(InvalidConfig, match=r"^lab: size is missing$"), toml.problems_of("lab"):
        toml.parse({}, Inner)
    (tmp_path / "a.toml").write_text("a = ")
    for path, problem in ((tmp_path / "a.toml", "is not TOML"), (tmp_path / "none", "cannot be read: No such file")):
        with pytest.raises(InvalidConfig, match=rf"^thing {path} {problem}"):
            toml.read(path, "thing")


def test_a_list_of_lists_has_a_line_for_each_of_them():
    text = toml.dumps({"a": {"stages": [["x", "y"], ["z, [\n"]], "flat": [1, 2]}})
    assert text == '[a]\nstages = [\n    ["x", "y"],\n    ["z, [\\n"],\n]\nflat = [1, 2]\n'
