"""README, docs/start/choosing.md and docs/guide/long-context.md: their commands run and print what they show."""

from itertools import zip_longest

import pytest
from tiny import ROOT
from walkthrough import is_alike, open_folder, read_blocks, shorten, write_blocks

README, PAGE, LONG = (ROOT / name for name in ("README.md", "docs/start/choosing.md", "docs/guide/long-context.md"))


@pytest.mark.parametrize(
    ("page", "least"), [(README, 1), (PAGE, 12), (LONG, 6)], ids=("readme", "choosing", "long-context")
)
def test_the_commands_of_a_page_print_what_it_shows(page, least, tmp_path, monkeypatch):
    open_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    blocks = read_blocks(page.read_text(encoding="utf-8"))
    assert len(blocks) >= least
    stale = []
    for block in blocks:
        for shown, printed in zip_longest(block.said, block.run(), fillvalue=""):
            if not is_alike(shown, printed):
                stale.append(f"$ {block.command}\n  the page:  {shown}\n  is printed: {printed}")
    assert not stale, "\n".join(["look at what changed, then make docs-choosing writes the page:", *stale])


def test_the_first_page_emits_for_more_than_one_program():
    words = [word for block in read_blocks(PAGE.read_text(encoding="utf-8")) for word in block.command.split()]
    emitted = {word.partition(".")[2] for word in words if word.endswith((".toml", ".sh"))}
    assert emitted == {"toml", "sh"}


@pytest.mark.parametrize("page", [README, PAGE, LONG], ids=lambda page: page.stem)
def test_a_page_is_found_from_the_readme_and_shows_nothing_that_nobody_checks(page):
    text = page.read_text(encoding="utf-8")
    assert page == README or f"]({page.relative_to(ROOT)})" in README.read_text(encoding="utf-8")
    assert text.count("```console\n") == len(read_blocks(text))


def test_a_page_is_written_with_what_its_commands_print_and_a_change_is_seen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "note.txt").write_text("tp4 takes 2.50 s\nmore\nPlaces 1 to 3 of 60 times\n")
    page = "before\n\n<!-- shows: takes|Places -->\n```console\n$ cat \\\n    note.txt\nstale\n```\nafter\n"
    written = write_blocks(page)
    assert written == page.replace("stale", "tp4 takes 2.50 s\n…\nPlaces 1 to 3 of 60 times")
    assert write_blocks(written) == written and read_blocks(written)[0].said[1] == "…"
    for other, alike in (("tp4 takes 2.51 s", True), ("tp4 takes 3.00 s", False), ("tp8 takes 2.50 s", False)):
        assert is_alike("tp4 takes 2.50 s", other) is alike
    assert is_alike("Places 1 to 3 of 60 times", "Places 1 to 4 of 71 times") and not is_alike("Places 1", "Plates 1")
    assert not is_alike("a b", "a") and shorten(["", "x"], "y") == ["…"]
