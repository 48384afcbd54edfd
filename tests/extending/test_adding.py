"""docs/project/adding.md sends nobody to a place that is not there."""

import re

import pytest
from tiny import ROOT

import dtlayout

TEXT = (ROOT / "docs" / "project" / "adding.md").read_text(encoding="utf-8")
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
FILES = sorted(set(re.findall(r"`([\w/]+(?:\.(?:py|toml|md)|/))`", PROSE)))
NAMES = sorted(set(re.findall(r"`(\w+)`\s+(?:in|of)\s+`([\w/]+\.py)`", PROSE)))
MADE = re.compile(r"NAME|FILE")
"""Files that the reader makes."""


def find(path: str):
    found = next((ROOT / folder / path for folder in ("dtlayout", "", "dtlayout/costmodel", "tests/extending/plugins")
                  if (ROOT / folder / path).exists()), None)  # fmt: skip
    assert found is not None, f"{path} is not there"
    return found


@pytest.mark.parametrize("path", [path for path in FILES if not MADE.search(path)])
def test_a_file_that_it_names_is_there(path):
    find(path)


@pytest.mark.parametrize(("name", "path"), NAMES, ids=lambda text: text)
def test_a_name_stands_in_the_file_that_it_says(name, path):
    assert re.search(rf"^\s*(def |class )?{name}\b", find(path).read_text(encoding="utf-8"), re.MULTILINE)


def test_calls_from_outside_are_public_and_links_lead_somewhere():
    calls = set(re.findall(r"\bregister_\w+", TEXT))
    assert calls == {name for name in dtlayout.__all__ if name.startswith("register_")}
    titles = {line.lstrip("# ").lower().replace(" ", "-") for line in TEXT.splitlines() if line.startswith("## ")}
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        file, _, anchor = target.partition("#")
        assert (ROOT / "docs" / "project" / file).exists() if file else anchor in titles, target
