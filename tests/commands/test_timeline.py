"""dtlayout timeline: the predicted step as text, as a document and as a trace."""

import json
from pathlib import Path

import pytest

from dtlayout.cli import main

ASKED = ["timeline", "configs/debug.toml", "--gpu", "cpu", "--gpus", "8"]


def test_each_rank_has_a_row_as_wide_as_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, order = tmp_path / "trace.json", tmp_path / "order.csv"
    written = ["--trace", str(trace), "--csv", str(order)]
    assert main([*ASKED, "--layout.schedule=zb-h1", "--width", "40", *written]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("rank")]
    assert [(row[1], len(row[2])) for row in rows] == [("0", 40), ("1", 40)]
    assert {*rows[0][2]} <= {*"FIW."} and "W" in rows[0][2]
    assert main([*ASKED, f"--layout.schedule=csv:{order}", "--width", "40"]) == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines() if line.startswith("rank")] == [
        row[2] for row in rows
    ]
    assert {each["pid"] for each in json.loads(trace.read_text())["traceEvents"]} == {0, 1}


def test_the_document_has_every_action_and_the_bubble_of_the_busiest_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--gpu", "a100-80g-sxm", "--precision.compute=bfloat16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    waits = [rank["waits_s"] for rank in found["ranks"]]
    assert found["bubble"] == pytest.approx(min(waits) / found["pipeline_s"]) and 0 < found["bubble"] < 1
    assert all(start < end <= found["pipeline_s"] for rank in found["ranks"] for _, start, end in rank["actions"])
    assert [rank["actions"][0][0] for rank in found["ranks"]] == ["0F0", "1F0"]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--layout.pp=1"], "has no pipeline; use layout.pp=2 or more"),
        (["--width", "0"], "--width 0 shows nothing; use 1 or more"),
    ],
)
def test_what_cannot_be_drawn_is_refused(more: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, *more]) == 2
    assert problem in capsys.readouterr().err


def test_on_a_cpu_that_nobody_calibrated_shares_of_the_whole_are_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    assert main([*ASKED, "--json", "--page", str(page), "--trace", str(trace)]) == 0
    found = json.loads(capsys.readouterr().out)
    ends = [end for rank in found["ranks"] for _, _, end in rank["actions"]]
    assert found["pipeline_s"] is None and max(ends) == pytest.approx(1.0)
    assert found["bubble"] == pytest.approx(min(rank["waits_s"] for rank in found["ranks"]))
    assert ' s"' not in page.read_text() and "whole drawn as 1 s" in trace.read_text()
    assert main(ASKED) == 0
    assert "of it the busiest rank waits" in (out := capsys.readouterr().out) and "no step time: " in out
