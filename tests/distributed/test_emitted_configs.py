"""Recommended layouts are TOML files that train.py runs: two of them, under torchrun on two gloo ranks."""

import pytest
from launching import launch, read_summary
from tiny import write_tiny

from dtlayout.cli import main

ASKED = "recommend --model debug --gpu cpu --gpus 2 --gpus-per-node 2 --seq-len 64 --global-batch 8 --top 1 --json"


@pytest.mark.parametrize(
    ("fixed", "expected"),
    [
        (("dp_shard=2", "zero=3", "recompute=full"), {"zero": 3, "recompute": "full"}),
        (("pp=2", "virtual_stages=2", "norm=eager"), {"pp": 2, "virtual_stages": 2}),
    ],
    ids=lambda value: "·".join(value) if isinstance(value, tuple) else "as asked",
)
def test_an_emitted_config_runs_as_it_is(fixed, expected, tmp_path, capsys):
    path, files = tmp_path / "best.toml", write_tiny(tmp_path)
    fixes = [word for choice in fixed for word in ("--fix", choice)]
    assert main([*ASKED.split(), "--precision", "compute=float32", *fixes, "--emit", str(path)]) == 0
    capsys.readouterr()
    shorter = [f"--data.source={files.corpus}", f"--data.folder={files.tokens}", "--train.steps=2"]
    code = launch(2, path, *shorter, f"--train.run_folder={files.run}", log=tmp_path / "log")
    assert code == 0, (tmp_path / "log").read_text()[-3000:]
    summary = read_summary(files.run)
    assert summary["outcome"] == "done" and summary["steps"] == 2
    assert summary["layout"].items() >= expected.items()
    assert all(peak > 0 for peak in summary["predicted"]["peak_memory_bytes"])
