"""An attention kernel from outside: one record and one function, and every program knows it."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import ROOT, TinyFiles, write_tiny

RECORD = """
from dtlayout.spec.kernel_records import AttentionKernel
from dtlayout.spec.kernel_table import register_kernel

register_kernel(
    AttentionKernel(
        name="mine", function="my_attention:attend", operators=("aten.bmm.default",),
        traffic="softmax_traffic_bytes", saved="score_saved_bytes",
    )
)
"""
FUNCTION = """
import torch

def attend(q_BHSK, k_BGSK, v_BGSK, mask):
    k_BHSK, v_BHSK = (x.repeat_interleave(q_BHSK.shape[1] // x.shape[1], 1) for x in (k_BGSK, v_BGSK))
    scores = q_BHSK @ k_BHSK.transpose(-2, -1) / q_BHSK.shape[-1] ** 0.5
    if mask is None:
        mask = torch.full(scores.shape[-2:], -torch.inf).triu(1)
    return (scores + mask).softmax(-1) @ v_BHSK
"""
PROGRAM = """
import sys

if __name__ == "__main__":  # a dry run starts processes
    if sys.argv[1] == "train":
        from dtlayout.launch import main
        other = ["--kernels.attention=sdpa-flash", f"--train.run_folder={sys.argv[2]}-other"]
        sys.exit(main(sys.argv[2:]) or main([*sys.argv[2:], *other]))
    from dtlayout.cli import main
    code = main(sys.argv[1:])
    print("torch" in sys.modules, file=sys.stderr)
    sys.exit(code)
"""


@pytest.fixture
def files(tmp_path: Path) -> TinyFiles:
    (tmp_path / "my_kernels.py").write_text(RECORD)
    (tmp_path / "my_attention.py").write_text(FUNCTION)
    (tmp_path / "program.py").write_text(PROGRAM)
    return write_tiny(tmp_path)


def run(files: TinyFiles, *arguments: str) -> subprocess.CompletedProcess[str]:
    folder = str(files.config.parent)
    path = os.pathsep.join([folder, str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "DTLAYOUT_PLUGINS": "my_kernels"}
    done = subprocess.run(
        [sys.executable, f"{folder}/program.py", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_it_takes_two_files(files):
    assert len(list(files.config.parent.glob("my_*"))) == 2


def test_an_attention_kernel_from_outside_is_checked_recommended_rehearsed_and_trained_with(files):
    config, mine = str(files.config), "--kernels.attention=mine"
    assert json.loads(run(files, "check", config, mine, "--json").stdout)["ok"]

    scenario = shlex.split("--model debug --gpu h100-80g-sxm --gpus 8 --seq-len 128 --global-batch 64")
    recommended = run(files, "recommend", *scenario, "--fix", "attention=mine", "--json")
    assert json.loads(recommended.stdout)["layouts"][0]["kernels"]["attention"] == "mine"
    assert recommended.stderr.splitlines()[-1] == "False"  # no torch

    rehearsed = run(
        files, "dryrun", config, mine, "--gpu", "cpu", "--world", "1", "--layout.recompute=selective", "--json"
    )
    (rank,) = json.loads(rehearsed.stdout)["ranks"]
    assert rank["peak_bytes"] > 0

    run(files, "train", config, mine, "--train.steps=2", "--layout.recompute=selective")
    own = [json.loads(line)["loss"] for line in (files.run / "metrics.jsonl").read_text().splitlines()]
    other = (Path(f"{config}-other") / "metrics.jsonl").read_text().splitlines()
    assert own == pytest.approx([json.loads(line)["loss"] for line in other], rel=1e-6)
