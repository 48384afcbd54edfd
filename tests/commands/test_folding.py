"""Lines of answers and notes are folded at the width of the terminal, and tables stay whole."""

import re
from contextlib import redirect_stderr
from io import StringIO

import pytest
from tiny import ROOT, write_tiny

from dtlayout.cli import main
from dtlayout.commands.arguments import print_note
from dtlayout.commands.ask import _list_notes

CONFIG = str(ROOT / "configs" / "llama-13b-64xa100.toml")
ON_A100 = ("--gpu", "a100", "--gpus", "64")
TABLE = re.compile(r"\S  +\S.*\S  +\S|^rank \d+ |^    the allocator   ")
"""Three cells with two blanks between them, a bar, or a row whose middle cell is empty."""


@pytest.mark.parametrize(
    "asked",
    [
        ("explain", CONFIG, *ON_A100),
        ("explain", CONFIG, *ON_A100, "--measured", "2000", "--engine", "torchtitan"),
        ("check", CONFIG, *ON_A100),
        ("timeline", CONFIG, *ON_A100, "--layout.pp=2"),
    ],
)
def test_sentences_of_an_answer_are_folded_and_no_word_is_lost(monkeypatch, capsys, asked):
    texts = {}
    for width in (80, 1000):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(asked) == 0
        said = capsys.readouterr()
        texts[width] = said.err + said.out
    assert texts[80].split() == texts[1000].split()
    assert len(texts[80].splitlines()) > len(texts[1000].splitlines())
    assert not [line for line in texts[80].splitlines() if len(line) > 80 and not TABLE.search(line)]


def test_a_note_of_train_is_folded_before_ranks_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("RANK", raising=False)  # of a test before, in this process
    monkeypatch.setattr("dtlayout.commands.train.run_ranks", lambda *_: 0)
    monkeypatch.setattr("dtlayout.data.check._SMALL_BYTES", 1)
    assert main(["train", str(write_tiny(tmp_path).config), "--ranks", "2"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].startswith("note: ") and lines[2].startswith("    ") and max(map(len, lines)) <= 80


def test_the_page_has_folded_notes_as_sentences_again(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    notes = StringIO()
    sentences = ["a note of so many words that the terminal, which is a narrow one, cannot hold it", "short"]
    with redirect_stderr(notes):
        for each in sentences:
            print_note(each)
    assert len(notes.getvalue().splitlines()) == 3 and _list_notes(notes) == sentences
