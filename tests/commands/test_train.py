"""dtlayout train: what it refuses before it starts anything, and how ranks end that it has started."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import ROOT, TinyFiles, write_tiny

from dtlayout.cli import main
from dtlayout.commands.train import _describe_kill, run_ranks

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyFiles:
    monkeypatch.delenv("RANK", raising=False)
    return write_tiny(tmp_path, steps=3000)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "3", "--layout.tp=3"], "tp=3 does not divide num_heads=4; use tp=2 or tp=4"),
        (["--ranks", "0"], "--ranks=0 must be at least 1"),
        (["--layout.pp=2"], "the layout takes 2 ranks or a multiple of that: say how many with --ranks N"),
        (["--ranks", "1", "--max-restarts=-1"], "--max-restarts=-1 must not be negative"),
        (["--ranks", "1", "--train.stpes=3"], "train.stpes is unknown; did you mean train.steps?"),
    ],
)
def test_what_is_wrong_is_said_before_any_process_starts(files, capsys, arguments, said):
    assert main(["train", str(files.config), *arguments]) == 2
    assert capsys.readouterr().err.splitlines()[0] == said
    assert not files.run.exists()


def test_an_answer_in_json_and_a_rank_of_torchrun_are_refused(files, capsys, monkeypatch):
    assert main(["train", str(files.config), "--ranks", "1", "--json"]) == 2
    assert "metrics.jsonl" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "0")
    assert main(["train", str(files.config), "--ranks", "1"]) == 2
    assert "let torchrun start -m dtlayout.launch CONFIG" in capsys.readouterr().err


def test_one_rank_is_this_process_and_a_whole_layout_says_the_ranks(files, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, command: started.append(command))
    monkeypatch.setattr("dtlayout.commands.train.run_ranks", lambda *rest: started.append(rest) or 0)
    assert main(["train", str(files.config), "--layout.dp_shard=2"]) == 0
    ((program, num_ranks, max_restarts, run_folder),) = started
    assert program[-3:] == ["dtlayout.launch", str(files.config), "--layout.dp_shard=2"]
    assert (num_ranks, max_restarts, run_folder) == (2, 0, files.run)
    assert main(["train", str(files.config), "--layout.dp_shard=1"]) == 0
    assert started[1][-3:] == ["dtlayout.launch", str(files.config), "--layout.dp_shard=1"]


def interrupt_at(
    beginning: str, files: TinyFiles, environment: dict[str, str], *arguments: str, ranks: int = 2, repeats: int = 1
) -> list[str]:
    """Lines of a training that gets one Ctrl-C, at the line that is the `repeats`-th with this beginning, and ends as
    stopped."""
    command = [sys.executable, "-m", "dtlayout", "train", str(files.config), "--ranks", str(ranks), *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout
    lines, num_found = [], 0
    for line in process.stdout:
        lines.append(line.rstrip())
        if line.startswith(beginning):
            num_found += 1
            if num_found == repeats:
                process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 3, lines
    return lines


WAITS_AT = """
import os, sys, threading
at = os.environ["WAITS_AT"]
def watch(event, arguments):
    if event in ("import", "open") and str(arguments[0]).endswith(at) and "dtlayout.launch" not in sys.orig_argv:
        print("waiting", flush=True)
        threading.Event().wait(120)
sys.addaudithook(watch)
"""


@pytest.mark.parametrize(
    ("phase", "at"),
    [
        ("torch is imported", "torch"),
        ("data are checked", "dtlayout.data.check"),
        ("data are tokenized", "corpus.txt"),
        ("the agent is imported", "torch.distributed.run"),
    ],
)
def test_the_first_line_comes_before_the_slow_checks_and_ctrl_c_there_ends_as_before_a_first_step(
    files, tmp_path, phase, at
):
    (tmp_path / "sitecustomize.py").write_text(WAITS_AT)
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "WAITS_AT": at}
    lines = interrupt_at("waiting\n", files, environment)
    assert lines[0] == "checking the device and the data, then starting 2 ranks", phase
    assert lines.index("waiting") == (2 if at == "torch.distributed.run" else 1)
    assert lines[-1] == "stopped before the first step: all is as it was"
    assert len(lines) == lines.index("waiting") + 2 and not files.run.exists()


def test_ranks_finish_their_step_at_ctrl_c(files):
    lines = interrupt_at("step   10/", files, ENVIRONMENT)
    assert lines[0] == "checking the device and the data, then starting 2 ranks"
    assert lines[1] == "starting 2 ranks: tiny as dp2 mb2 zero1"
    (finishing,) = [line for line in lines if line.startswith("finishing step ")]
    (ended,) = [line for line in lines if line.startswith("stopped after ")]
    assert ended.split()[2] in re.findall(r"\d+", finishing)
    assert lines[-1].startswith("└"), "our own table is the last"
    assert "Traceback" not in "\n".join(lines)


def test_what_a_kill_loses_is_said(tmp_path):
    assert _describe_kill(tmp_path) == "killed: no checkpoint is there, so that all steps are lost"
    for step in (3, 12):
        (tmp_path / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
    newest = tmp_path / "checkpoints" / "step-00000012"
    said = f"killed: the newest checkpoint is {newest}, and what came after its 12 steps is lost"
    assert _describe_kill(tmp_path) == said


def test_a_gpu_that_is_not_there_is_refused_before_ranks_start(files, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["train", str(files.config), "--ranks", "2", "--train.device=cuda"]) == 2
    said = capsys.readouterr().err
    assert "train.device='cuda', but torch finds no CUDA device here" in said and "starting 2 ranks:" not in said


def test_a_bad_row_far_behind_the_first_ones_is_refused_before_ranks_start(files, monkeypatch, capsys):
    started = []
    monkeypatch.setattr("dtlayout.commands.train.run_ranks", lambda *rest: started.append(rest) or 0)
    rows = files.corpus.with_name("rows.jsonl")
    rows.write_text('{"text": "one of many rows of some words"}\n' * 4000 + '{"text": "never closed\n')
    asked = ["train", str(files.config), "--ranks", "2", f"--data.source={rows}"]
    assert main(asked) == 2
    said = capsys.readouterr().err
    assert said.splitlines()[1].startswith(f"reading '{rows}' broke at line 4001 of 'rows.jsonl': JSONDecodeError")
    assert "starting 2 ranks:" not in said and not started and not files.run.exists()
    monkeypatch.setattr("dtlayout.data.check._SMALL_BYTES", 1000)
    assert main(asked) == 0 and len(started) == 1
    assert "note: 0.2 MiB of data are not prepared: a bad row is found while" in capsys.readouterr().err


def test_a_run_that_is_done_reads_no_data_before_its_ranks_say_so(files, monkeypatch, capsys):
    started = []
    monkeypatch.setattr("dtlayout.commands.train.run_ranks", lambda *rest: started.append(rest) or 0)
    files.run.mkdir()
    (files.run / "summary.json").write_text('{"outcome": "done", "steps": 3000}')
    files.corpus.unlink()
    assert main(["train", str(files.config), "--ranks", "2"]) == 0 and len(started) == 1
    assert main(["train", str(files.config), "--ranks", "2", "--train.steps=3001"]) == 2
    assert "corpus.txt" in capsys.readouterr().err and len(started) == 1


WAITS = """
import os, sys, threading
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "dtlayout.config.checking" and "dtlayout.launch" in sys.orig_argv:
            os.write(1, b"importing\\n")  # at once: ranks that print may have a line of both
            threading.Event().wait(120)
sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_while_ranks_still_import_ends_with_one_plain_line(files, tmp_path, ranks):
    (tmp_path / "sitecustomize.py").write_text(WAITS)
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    lines = interrupt_at("importing\n", files, environment, "--layout.dp_shard=-1", ranks=ranks, repeats=ranks)
    (said,) = [line for line in lines if not line.startswith(("checking ", "starting ", "importing", "Ctrl-C again"))]
    assert said == "stopped before the first step: all is as it was"


@pytest.mark.parametrize(
    ("end", "exit_code", "said"),
    [
        ("sys.exit(4 if rank else 0)", 4, ""),
        ("sys.exit(0)", 0, ""),
        ("rank and os.kill(os.getpid(), 9)", 1, "rank 1 ended with signal SIGKILL, and so the run has ended; its own"),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(capfd, end, exit_code, said):
    program = [sys.executable, "-c", f"import os, sys; rank = int(os.environ['RANK']); {end}"]
    assert run_ranks(program, num_ranks=2) == exit_code
    assert capfd.readouterr().err.startswith(said)
