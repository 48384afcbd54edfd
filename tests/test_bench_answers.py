"""Answers that are kept are found again, and a changed one is shown where it parts."""

import json
from pathlib import Path

import pytest

from benchmarks import answers
from benchmarks.answers import KINDS, Answer, compare, find_difference, keep


def test_what_is_kept_is_answered_alike_and_a_change_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("explain", "check", "timeline"):
        monkeypatch.setitem(KINDS, kind, (4, KINDS[kind][1]))
    kinds, file = ["explain", "check", "timeline"], tmp_path / "answers.jsonl"
    assert keep(file, seed=3, only=kinds) == 0 and compare(file, kinds) == 0
    assert capsys.readouterr().out.endswith("explain: 0 of 4 differ, check: 0 of 4 differ, timeline: 0 of 4 differ\n")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    refused = [exit_code != 0 for _, exit_code, _, _ in lines]
    assert not all(refused) and sum(refused) <= 6, "at most half of each kind"
    at = next(i for i, line in enumerate(lines) if line[1] == 0 and line[0][0] == "explain")
    lines[at][2] = lines[at][2].replace("0", "1", 1)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compare(file, kinds) == 1
    out = capsys.readouterr().out
    assert f"dtlayout {' '.join(lines[at][0])}\n  out: " in out and "explain: 1 of 4 differ" in out


def test_answers_part_at_their_first_differing_line() -> None:
    same = Answer(0, "a\nb\n", "")
    assert find_difference(same, same) == ""
    assert find_difference(same, Answer(0, "a\nc\n", "")) == "out: 'b' became 'c'"
    assert find_difference(same, Answer(0, "a\nb\nc\n", "")) == "out: nothing became 'c'"
    assert find_difference(same, Answer(2, "a\nb\n", "no")) == "exit_code: '0' became '2'"


def test_a_training_answers_with_its_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {tuple(KINDS["train"][1](answers.Random(str(seed)))) for seed in range(20)}
    assert len(lines) > 10 and all(line[0] == "train" and sum("=2" in key for key in line[1:5]) == 1 for line in lines)
