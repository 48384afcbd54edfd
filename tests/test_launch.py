"""train.py up to the first import of torch: what is refused, who says so and how the process ends."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from tiny import ROOT, TinyFiles, write_tiny

from dtlayout import cli, launch
from dtlayout.base.errors import DataError, LostRanks
from dtlayout.base.lease import LEASE_NAME, Lease, hold
from dtlayout.base.signals import Stopped
from dtlayout.config.loading import load_config
from dtlayout.launch import USAGE, main
from dtlayout.spec.cluster import find_gpu
from dtlayout.spec.device import device_of
from dtlayout.training.metrics import read_summary


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyFiles:
    monkeypatch.setattr(launch, "SECONDS_TO_SAY_WHY", 0.0)
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    return write_tiny(tmp_path)


LAUNCHED = ("RANK", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
SRUN = {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0"}
"""What srun sets beside the SLURM_PROCID of each task."""


def test_help_is_the_usage_and_no_argument_is_a_refusal_with_it(capsys):
    assert [main(["-h"]), main(["--help"]), main([])] == [0, 0, 2]
    assert capsys.readouterr().out == f"{USAGE}\n" * 3


@pytest.mark.parametrize(
    ("environment", "said"),
    [({}, "world size 1 does not fit the layout"), ({**SRUN, "SLURM_PROCID": "0"}, "srun started 4 processes")],
)
def test_a_refusal_comes_before_torch_is_imported(files, environment, said):
    code = (
        "import os, sys; from dtlayout.launch import main; code = main(sys.argv[1:]);"
        "print(sorted({'torch', 'numpy', 'datasets'} & set(sys.modules)), os.environ['TORCH_DIST_USE_NCCL2']);"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(files.config), "--layout.tp=3"],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "[] 0\n")  # torch 2.15 reads the variable when it is imported
    assert done.stderr.startswith(said) and "Traceback" not in done.stderr


NO_TOKENIZER = ("--data.tokenizer=none.json",)
NO_TEMPLATE = ("--data.messages_field=messages", "--data.chat_template=none.jinja")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("--data.source=nowhere/*.txt",), "no file matches 'nowhere/*.txt'"),
        (("--validation.source=nowhere/*.txt",), "no file matches 'nowhere/*.txt'"),
        (NO_TOKENIZER, "tokenizer 'none.json': there is no file 'none.json'"),
        (NO_TEMPLATE, "the chat template 'none.jinja' cannot be read"),
        (("--model.vocab_size=256",), "the tokenizer has 257 ids, the model's vocab_size=256"),
    ],
)
def test_what_is_wrong_with_the_data_is_said_before_torch_is_imported(files, capsys, overrides, said):
    code = (
        "import sys; from dtlayout.launch import main; code = main(sys.argv[1:]);"
        "print(sorted({'torch', 'datasets'} & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(files.config), *overrides],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "[]\n")
    assert done.stderr.startswith(said) and "Traceback" not in done.stderr
    assert json.loads((files.run / "summary.json").read_text())["problems"] == done.stderr.splitlines()
    assert cli.main(["check", str(files.config), "--data", *overrides]) == 2
    assert capsys.readouterr().err == done.stderr


def test_train_py_ends_with_the_exit_code_of_a_refusal_and_no_traceback(files):
    done = subprocess.run(
        [sys.executable, "train.py", str(files.config), "--train.stpes=3"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "train.stpes is unknown; did you mean train.steps?\n"


@pytest.mark.parametrize(
    ("environment", "rank", "said"),
    [
        (SRUN, "SLURM_PROCID", "srun started 4 processes (SLURM_STEP_NUM_TASKS=4)"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK", "mpirun started 2 processes (OMPI_COMM_WORLD_SIZE=2)"),
        ({"PMI_SIZE": "16"}, "PMI_RANK", "mpirun started 16 processes (PMI_SIZE=16)"),
    ],
)
def test_worlds_of_one_rank_that_would_share_a_folder_are_refused(files, capsys, monkeypatch, environment, rank, said):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    waited = []
    monkeypatch.setattr("dtlayout.launch.time.sleep", waited.append)
    monkeypatch.setenv(rank, "1")
    assert main([str(files.config)]) == 2
    assert (capsys.readouterr().err, waited) == ("", [launch.SECONDS_TO_SAY_WHY])
    monkeypatch.setenv(rank, "0")
    assert main([str(files.config)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(said) and error.count("\n") == 1
    assert "start one torchrun a node, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT" in error
    assert not files.run.exists()


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # a batch script, and the shell of salloc
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "3"},  # srun -n 1
        {**SRUN, "SLURM_PROCID": "2", "RANK": "0"},  # a torchrun on each node, which says the ranks
        {"PMI_SIZE": "", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_one_process_of_a_job_and_those_that_know_their_rank_go_on(files, capsys, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main([str(files.config), "--layout.tp=3"]) == 2  # what a rank refuses that got so far
    assert capsys.readouterr().err.startswith("world size 1 does not fit the layout")


@pytest.mark.parametrize(("rank", "local_rank"), [(0, 0), (1, 1), (7, 7), (8, 0)])
def test_one_rank_of_each_node_says_why(files, capsys, monkeypatch, rank, local_rank):
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", 8), ("WORLD_SIZE", 16)):
        monkeypatch.setenv(name, str(value))
    assert main([str(files.config), "--layout.dp_shard=2"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("world size 16 does not fit the layout: dp_shard=2 needs 2 ranks") == (local_rank == 0)
    assert bool(said) == (local_rank == 0)


def test_ranks_that_no_torchrun_would_end_all_say_why(files, capsys, monkeypatch):
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "3"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert main([str(files.config), "--layout.tp=3"]) == 2
    assert capsys.readouterr().err.startswith("world size 4 does not fit the layout")


@pytest.mark.parametrize("given", [None, "", "many"])
def test_the_world_size_is_torchruns_and_one_without_it(files, capsys, monkeypatch, given):
    if given is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", given)
    assert main([str(files.config), "--layout.tp=2"]) == 2
    assert capsys.readouterr().err.startswith("world size 1 does not fit the layout: tp=2 needs a multiple of 2 ranks")


def test_a_refusal_leaves_a_summary_with_its_problems_from_one_rank(files, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert main([str(files.config), "--layout.tp=3"]) == 2
    assert not files.run.exists()
    monkeypatch.setenv("RANK", "0")
    assert main([str(files.config), "--layout.tp=3"]) == 2
    summary = json.loads((files.run / "summary.json").read_text())
    assert (summary["outcome"], summary["exit_code"]) == ("refused", 2)
    assert any(problem.startswith("tp=3 does not divide") for problem in summary["problems"])


def end_run(files: TinyFiles, text: str) -> None:
    """Leave this as the summary of an earlier run."""
    files.run.mkdir(exist_ok=True)
    (files.run / "summary.json").write_text(text)


def test_a_refusal_leaves_the_summary_of_an_earlier_run(files):
    end_run(files, '{"outcome": "done", "exit_code": 0}')
    assert main([str(files.config), "--layout.tp=3"]) == 2
    assert (files.run / "summary.json").read_text() == '{"outcome": "done", "exit_code": 0}'


@pytest.mark.parametrize("outcome", [("done", 0), ("stopped", 3), ("non_finite", 4)])
def test_a_refusal_after_the_check_keeps_what_an_earlier_run_reached_and_says_why_beside_it(
    files, monkeypatch, outcome
):
    reached = {"outcome": outcome[0], "exit_code": outcome[1], "steps": 1, "final_loss": 2.5}
    end_run(files, json.dumps(reached))
    nowhere = [str(files.config), "--data.source=nowhere/*.txt"]
    assert main(nowhere) == 2
    summary = json.loads((files.run / "summary.json").read_text())
    assert {name: summary[name] for name in reached} == reached
    assert summary["refused"][0].startswith("no file matches 'nowhere/*.txt'")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main([str(files.config)]) == 2  # as the start before it, not as the run before that
    assert not (files.run / LEASE_NAME).exists()


def test_a_second_run_in_a_folder_is_refused_and_changes_nothing_there(files, capsys):
    end_run(files, '{"outcome": "running", "exit_code": null}')
    with hold(files.run):
        before = {path.name: path.read_text() for path in files.run.iterdir()}
        assert main([str(files.config)]) == 2
        assert {path.name: path.read_text() for path in files.run.iterdir()} == before
    assert f"belongs to another run: pid {os.getpid()} on " in capsys.readouterr().err


def test_a_start_after_one_that_a_lease_refused_ends_at_once_and_says_so(files, capsys, monkeypatch, tmp_path):
    error_files = [tmp_path / "agent" / f"attempt_{i}" / "0" / "error.json" for i in range(2)]
    error_files[0].parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_files[0]))
    with hold(files.run):
        assert main([str(files.config)]) == 2
    refusal = capsys.readouterr().err
    assert refusal.startswith(f"train.run_folder='{files.run}' belongs to another run: ")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_files[1]))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main(["a config that nobody reads"]) == 2
    assert capsys.readouterr().err == f"not tried again: {refusal}"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "another agent" / "attempt_0" / "0" / "error.json"))
    assert main(["a config that nobody reads"]) == 2
    assert "not tried again" not in capsys.readouterr().err


def test_a_layout_that_is_refused_writes_nothing_into_a_folder_that_another_run_has(files):
    with hold(files.run):
        assert main([str(files.config), "--layout.tp=3"]) == 2
        assert [path.name for path in files.run.iterdir()] == [LEASE_NAME]


@pytest.mark.parametrize("raised", [Stopped(), DataError("damaged"), LostRanks("some are not there")])
def test_a_start_that_has_lost_its_folder_says_nothing_there_of_how_it_ended(files, monkeypatch, raised):
    """The process ends instead, which this test could not outlive."""
    looked = []
    monkeypatch.setattr(Lease, "check", lambda lease, trusted_s=0.0: looked.append(read_summary(files.run)["outcome"]))
    monkeypatch.setattr("dtlayout.training.run.train", raise_it(raised))
    assert main([str(files.config)]) == (3 if isinstance(raised, Stopped) else raised.exit_code)
    assert looked == ["running"]  # before anything was written
    assert read_summary(files.run)["outcome"] != "running"


def raise_it(error: Exception) -> Callable[..., NoReturn]:
    """What raises this, whatever it is called with."""

    def call(*_: object) -> NoReturn:
        raise error

    return call


@pytest.mark.parametrize("exit_code", [0, 2, 3, 4])
def test_a_restarted_process_ends_as_the_run_did(files, monkeypatch, exit_code):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    end_run(files, json.dumps({"outcome": "whatever", "exit_code": exit_code}))
    assert main([str(files.config)]) == exit_code


@pytest.mark.parametrize("restarts", ["0", "1"])
@pytest.mark.parametrize("outcome", ["stopped", "crashed"])
def test_a_run_that_torchrun_stopped_since_nodes_came_or_went_goes_on(files, monkeypatch, capsys, restarts, outcome):
    code = {"stopped": 3, "crashed": None}[outcome]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    end_run(files, json.dumps({"outcome": outcome, "exit_code": code, "world_size": 2, "steps": 4}))
    assert main([str(files.config), "--data.source=nowhere"]) == 2  # it goes on as far as to its data
    assert "no file matches 'nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize("restarts", ["0", "1"])
@pytest.mark.parametrize("summary", ['{"outcome": "running", "exit_code": null}', "{", ""])
def test_a_run_that_did_not_end_is_started_again(files, monkeypatch, restarts, summary):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    end_run(files, summary)
    monkeypatch.setenv("WORLD_SIZE", "7")  # what is started again is refused, so nothing trains here
    assert main([str(files.config)]) == 2


def test_a_process_that_is_no_restart_looks_at_no_summary(files, monkeypatch):
    end_run(files, '{"outcome": "stopped", "exit_code": 3}')
    monkeypatch.setenv("WORLD_SIZE", "7")
    for restarts in (None, "0"):
        if restarts:
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        assert main([str(files.config)]) == 2


def test_a_finished_run_is_left_as_it_is(files, capsys):
    end_run(files, '{"outcome": "done", "exit_code": 0, "steps": 1000}')
    assert main([str(files.config)]) == 0
    assert "has done its 1000 steps; raise train.steps" in capsys.readouterr().out
    assert (files.run / "summary.json").read_text() == '{"outcome": "done", "exit_code": 0, "steps": 1000}'


def test_a_run_folder_that_cannot_be_made_is_refused(files, capsys):
    files.run.write_text("a file")
    assert main([str(files.config)]) == 2
    assert capsys.readouterr().err.startswith(f"train.run_folder='{files.run}' cannot be written: ")


def test_a_refusal_of_the_data_leaves_a_summary_too(files, capsys):
    assert main([str(files.config), "--data.source=nowhere/*.txt"]) == 2
    assert "nowhere" in capsys.readouterr().err
    summary = json.loads((files.run / "summary.json").read_text())
    assert (summary["outcome"], summary["exit_code"]) == ("refused", 2)


LARGE = ("--model.hidden_size=8192", "--model.ffn_size=28672", "--model.num_layers=80", "--precision.compute=bfloat16")
"""A model that no GPU holds alone."""


def test_a_layout_far_beyond_the_gpus_memory_is_refused_before_the_data_are_opened(files, capsys, monkeypatch):
    from dtlayout.training import start

    def opened(*_):
        raise DataError("opened")

    monkeypatch.setattr(start, "open_device", lambda *_: device_of(find_gpu("a100-80g-sxm")))
    monkeypatch.setattr(start, "open_store", opened)
    arguments = [str(files.config), *LARGE]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert " GiB of a100-80g-sxm, most of it " in said and "--train.force=true" in said
    assert "Traceback" not in said and "opened" not in said
    summary = json.loads((files.run / "summary.json").read_text())
    assert (summary["outcome"], summary["exit_code"], summary["problems"]) == ("refused", 2, said.splitlines())
    assert main([*arguments, "--train.force=true"]) == 2
    assert "opened" in capsys.readouterr().err


def test_a_finished_folder_refuses_another_experiment(files, capsys):
    end_run(files, '{"outcome": "done", "exit_code": 0, "steps": 1000}')
    (files.run / "config.toml").write_text(load_config(files.config).to_toml())
    assert main([str(files.config), "--train.steps=3"]) == 0
    assert main([str(files.config), "--train.seed=3", "--optimizer.lr=0.5"]) == 2
    assert "holds a finished run with another optimizer, train.seed; use another folder" in capsys.readouterr().err


def test_a_finished_folder_knows_its_run_by_another_name_and_another_way_to_its_tokenizer(files, capsys):
    end_run(files, '{"outcome": "done", "exit_code": 0, "steps": 1000}')
    config = load_config(files.config, [f"--data.tokenizer={files.run.parent}/words/tokenizer.json"])
    (files.run / "config.toml").write_text(replace(config, model=replace(config.model, name="folder")).to_toml())
    way = os.path.relpath(files.run.parent / "words" / "tokenizer.json")
    assert main([str(files.config), f"--data.tokenizer={way}"]) == 0, capsys.readouterr().err
    assert "has done its 1000 steps" in capsys.readouterr().out


def test_a_rank_that_says_nothing_leaves_last(files, monkeypatch):
    waited = []
    monkeypatch.setattr("dtlayout.launch.time.sleep", waited.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main([str(files.config), "--layout.tp=3"]) == 2
    assert waited == [launch.SECONDS_TO_SAY_WHY]
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main([str(files.config), "--layout.tp=3"]) == 2
    assert len(waited) == 1


@pytest.mark.parametrize(("is_torchrun", "ended"), [(True, None), (False, 3)])
def test_a_start_that_was_stopped_early_is_over_but_where_torchrun_may_start_it_again(
    tmp_path, monkeypatch, is_torchrun, ended
):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if is_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    launch._write_stopped(tmp_path, {"steps": 5, "world_size": 4, "exit_code": 0})
    summary = read_summary(tmp_path)
    assert (summary["outcome"], summary["steps"]) == ("stopped", 5)
    assert launch._find_end(summary, 4) == ended
