"""A sweep of the real trainer: what ran is measured, and predictions are held to it."""

import json

import pytest
from tiny import write_tiny

from dtlayout.cli import main
from dtlayout.sweep import processes


def test_a_layout_is_run_measured_and_compared_with_its_prediction(tmp_path, capsys):
    write_tiny(tmp_path)
    path, folder = tmp_path / "sweep.toml", tmp_path / "out"
    path.write_text(
        'config = "tiny.toml"\nworld = 2\nsteps = 6\nwarmup_steps = 2\ntimeout_s = 100\n'
        'overrides = ["--train.device=cpu"]\n[axes.layout]\ntp = [2, 3]\n'
    )
    assert main(["sweep", str(path), "--folder", str(folder), "--json"]) == 0
    ran, refused = json.loads(capsys.readouterr().out)["trials"]
    assert (ran["outcome"], ran["steps"]) == ("ok", 6), ran["cause"]
    assert ran["layout"]["tp"] == 2 and refused["outcome"] == "refused"
    assert ran["tokens_per_s_per_gpu"] == pytest.approx(8 * 16 / 2 / ran["step_time_s"], rel=0.01)
    assert len(ran["peak_memory_bytes"]) == 1 and ran["peak_memory_bytes"][0] > 4 * 50_000 / 2
    assert processes.find(str(folder.resolve())) == []
    assert main(["validate", str(folder), "--json"]) == 0
    (scores,) = json.loads(capsys.readouterr().out)["tables"].values()
    error = abs(1 - ran["step_time_s"] / ran["predicted"]["step_time_s"])
    assert scores["rows"] == 1 and scores["mape"] == pytest.approx(error, rel=0.01)
