"""A sweep of the real trainer: what ran is measured, and predictions are held to it."""

import json

import pytest
from tiny import write_tiny
from trap import list_caught, set_trap

from dtlayout.cli import main
from dtlayout.sweep import processes


def test_a_layout_is_run_measured_and_compared_with_its_prediction(tmp_path, capsys, monkeypatch):
    write_tiny(tmp_path)
    caught = set_trap(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    path, folder = tmp_path / "sweep.toml", tmp_path / "out"
    path.write_text(
        'config = "tiny.toml"\nworld = 2\nsteps = 6\nwarmup_steps = 2\ntimeout_s = 100\n'
        'overrides = ["--train.device=cpu"]\n[axes.layout]\ntp = [2, 3]\n'
    )
    assert main(["sweep", str(path), "--folder", str(folder), "--json"]) == 0
    ran, refused = json.loads(capsys.readouterr().out)["trials"]
    assert (ran["outcome"], ran["steps"]) == ("ok", 6), ran["cause"]
    assert ran["run"]["layout"]["tp"] == 2 and (refused["outcome"], refused["run"]) == ("refused", None)
    predicted, measured = ran["run"]["predicted"], ran["run"]["measured"]
    assert measured["tokens_per_s"] == pytest.approx(8 * 16 / measured["step_time_s"], rel=0.01)
    (peak,) = measured["peak_memory_bytes"]
    assert peak > 4 * 50_000 / 2
    assert processes.find(str(folder.resolve())) == [] and list_caught(caught) == []
    assert main(["validate", str(folder), "--json"]) == 0
    (scores,) = json.loads(capsys.readouterr().out)["tables"].values()
    error = abs(predicted["peak_memory_bytes"][0] / peak - 1)
    assert scores["rows"] == 1 and scores["memory"] == pytest.approx(error, rel=0.01) and scores["mape"] > 0
