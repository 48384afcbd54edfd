"""Every example runs as its docstring says, checks its own claim, and prints what it shows."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from exampled import run_example
from ranks import Ranks
from thorough import mostly_thorough

ROOT = Path(__file__).parents[1]
LINES = {
    "adapter_on_your_module": "rank 3: gradients of 0.widen.lora_A.weight, 0.widen.lora_B.weight, "
    "1.widen.lora_A.weight, 1.widen.lora_B.weight as on one process",
    "compile_experiment": "| layout | compile | loss | first step, s | later steps, s | graphs | graph breaks |",
    "finetune_a_llama": "merged: What colour has snow? grey",
    "long_context_on_your_module": "each of 4 ranks has 16 of 64 tokens: ring, gather, all-to-all as on one",
    "mesh_in_three_lines": "rank 3 is at {'pp': 0, 'dp_replicate': 0, 'dp_shard': 1, 'cp': 0, 'tp': 1}; "
    "the ranks of its tp group add up to 5",
    "plan_on_your_module": "0.*.widen   tp colwise",
    "pipeline_your_module": "rank 1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    "stages_in_torchs_pipeline": "loss and gradients as on one process",
    "train_any_decoder": "gemma was trained, and transformers opens it as GemmaForCausalLM",
    "train_llama_step": "pp2·tp2+sp mb1 1f1b zero1",
}
"""Example → a line that it prints."""
SLOW = ("compile_experiment", "finetune_a_llama", "train_any_decoder")
"""Examples for `make test-all` alone, which compile, or start one run after the other; other tests have their parts."""
IN_POOL = (
    "adapter_on_your_module", "long_context_on_your_module", "pipeline_your_module", "plan_on_your_module",
    "train_llama_step",
)  # fmt: skip
"""Examples of four ranks that run in a pool that is there; for `mesh_in_three_lines` a torchrun is started."""
PIECES = ("adapter_on_your_module", "long_context_on_your_module", "pipeline_your_module")
"""Examples of one piece on a module of one's own, of at most `MOST_LINES` lines."""
MOST_LINES = 40
TORCHRUN_KILLS_AFTER_S = 30
"""torchrun gives its ranks this long after SIGTERM."""
NAMES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", mostly_thorough(NAMES, lambda _, name: name not in SLOW))
def test_example_does_what_it_claims(name: str, ranks4: Ranks) -> None:
    path = f"examples/{name}.py"
    launch = re.search(rf"^(python|torchrun --nproc-per-node \d+) {re.escape(path)}$", (ROOT / path).read_text(), re.M)
    assert launch, f"the docstring of {path} gives the line that runs it"
    if name in IN_POOL:
        assert launch[1] == "torchrun --nproc-per-node 4"
        assert LINES[name] in "".join(ranks4.run(run_example, str(ROOT / path))).splitlines()
        return
    _, *options = launch[1].split()
    launcher = ["-m", "torch.distributed.run", "--standalone", *options] if options else []
    exit_code, output = run([*launcher, path], limit_s=400)
    assert exit_code == 0, output
    assert LINES[name] in output.splitlines(), output


@pytest.mark.parametrize("name", PIECES)
def test_a_piece_needs_few_lines(name: str) -> None:
    lines = (ROOT / f"examples/{name}.py").read_text().splitlines()
    assert len(list(filter(str.strip, lines))) <= MOST_LINES


def test_the_experiment_with_compile_is_short() -> None:
    assert len((ROOT / "examples/compile_experiment.py").read_text().splitlines()) <= 60


def run(arguments: list[str], limit_s: float) -> tuple[int, str]:
    """Exit code and output of python with these arguments; after the limit it and all that it started are killed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        # Each rank has a process group of its own, which torchrun kills when it is asked to end.
        process.terminate()
        try:
            output, _ = process.communicate(timeout=TORCHRUN_KILLS_AFTER_S + 10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        pytest.fail(f"{arguments} did not end within {limit_s:g} s:\n{output}")
    return process.returncode, output
