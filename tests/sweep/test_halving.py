"""Successive halving finds the fastest with few runs, leaves out what does not run, and goes on where it was."""

import json

import pytest
from sweeping import read_starts, write_sweep

from dtlayout.base.errors import InvalidConfig
from dtlayout.cli import main
from dtlayout.sweep.halving import Halving, halve
from dtlayout.sweep.spec import read_sweep


def test_each_round_runs_what_the_last_one_left():
    seconds = {n: float(100 - n) for n in range(30)}  # the last are fastest, and 29 does not run
    tried: list[tuple[int, int]] = []

    def run(left, steps):
        tried.append((len(left), steps))
        return {n: seconds[n] for n in left if n != 29}

    *_, last = halve(range(30), Halving(first=1.0, keep=0.3, steps=(2, 4, 8)), run)
    assert tried == [(30, 2), (9, 4), (3, 8)] and last == [28]


def test_the_first_round_takes_what_is_predicted_fastest():
    rounds = list(halve("abcdef", Halving(first=0.5, keep=0.5, steps=(1, 2)), lambda left, _: dict.fromkeys(left, 1.0)))
    assert rounds == [["a", "b"], ["a"]]


def test_where_nothing_runs_nothing_is_left():
    assert list(halve("abc", Halving(first=1.0), lambda left, steps: {})) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("halving = 3", "halving is a table: write [halving]"),
        ("[halving]\nkep = 0.3", "halving.kep is unknown; did you mean halving.keep?"),
        ("[halving]\nkeep = 0", "halving.keep=0.0 must lie above 0 and be at most 1"),
        ("[halving]\nfirst = 2.0", "halving.first=2.0 must lie above 0 and be at most 1"),
        ("[halving]\nsteps = [6, 6]", "halving.steps=[6, 6] must be whole numbers of at least 1, each above the last"),
        ("[halving]\nsteps = []", "halving.steps=[] must be whole numbers"),
        ("[halving]\nsteps = [2, 6]", "halving.steps[0]=2 leaves no step after 2 to warm up"),
    ],
)
def test_a_halving_that_cannot_be_is_refused(tmp_path, text, problem):
    with pytest.raises(InvalidConfig) as caught:
        read_sweep(write_sweep(tmp_path, seeds=2, more=text))
    assert problem in str(caught.value)


def test_a_sweep_is_halved_for_real_and_goes_on_where_it_was(tmp_path, capsys):
    """Of seeds 0 to 9 seven end badly; the fastest of the rest runs twice, and nothing that ended runs again."""
    path = write_sweep(tmp_path, seeds=10, more="[halving]\nfirst = 1.0\nkeep = 0.2\nsteps = [4, 6]")
    folder = tmp_path / "out"
    command = ["sweep", str(path), "--folder", str(folder), "--json"]
    assert main(command) == 0
    [best, *others] = json.loads(capsys.readouterr().out)["trials"]
    assert (len(others), best["outcome"], best["steps"]) == (1, "ok", 6)
    starts = read_starts(folder)
    assert sum(starts.values()) == 10 + 2 and sorted(starts.values())[-2:] == [2, 2]
    lines = (folder / "trials.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["steps"] for line in lines if json.loads(line)["outcome"] == "ok") == [
        4,
        4,
        4,
        4,
        6,
        6,
    ]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["trials"] == [best, *others]
    assert read_starts(folder) == starts
    assert main([*command[:-1], "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in listed} == {"done"}
    assert sum(f"{best['run']['measured']['step_time_s']:.3f} s a step" in line for line in listed) == 1
