"""scripts/slurm.sbatch under a Slurm that is played: what comes again, what does not, and how often."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import read_lines, read_summary, wait_for_steps
from slurm import SCRIPT, Slurm
from tiny import TinyFiles, write_tiny
from trap import list_caught, set_trap


@pytest.fixture
def files(tmp_path: Path) -> TinyFiles:
    return write_tiny(tmp_path, steps=100_000, num_layers=1)


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path / "slurm")


def end_as(files: TinyFiles, outcome: str) -> str:
    """What a task does to end like that."""
    kept = {"outcome": "stopped", "refused": ["no file matches"]}  # by an earlier start, and refused by this one
    summary = "{" if outcome == "torn" else json.dumps(kept if outcome == "refused late" else {"outcome": outcome})
    return f"echo '{summary}' > {files.run}/summary.json; exit {int(outcome != 'done')}"


@pytest.mark.parametrize(
    ("outcome", "exit_code", "num_requeued"),
    [
        ("done", 0, 0),
        ("stopped", 0, 1),
        ("refused", 2, 0),
        ("refused late", 2, 0),
        ("non_finite", 4, 0),
        ("running", 0, 1),
        ("torn", 0, 1),
    ],
)
def test_what_was_stopped_or_has_crashed_comes_again(slurm, files, outcome, exit_code, num_requeued):
    assert slurm.submit(files.config, step=end_as(files, outcome)) == exit_code, slurm.log.read_text()
    assert slurm.num_requeued == num_requeued


def test_a_run_that_crashes_at_one_place_comes_again_so_often_and_no_more(slurm, files):
    for attempt in range(3):
        assert slurm.submit(files.config, step="exit 1", MAX_CRASHES="2") == int(attempt == 2), slurm.log.read_text()
    assert slurm.num_requeued == 2
    assert (
        "crashed after 2 more attempts that saved nothing newer than the start: not requeued" in slurm.log.read_text()
    )
    for step in (1, 2, 3):  # it gets on
        save = f"mkdir -p {files.run}/checkpoints/step-0000000{step}; exit 1"
        assert slurm.submit(files.config, step=save, MAX_CRASHES="1") == 0
    assert slurm.submit(files.config, step="exit 1", MAX_CRASHES="1") == 1
    assert slurm.num_requeued == 5


def test_a_summary_of_an_earlier_attempt_says_nothing_of_this_one(slurm, files):
    for _ in range(2):
        assert slurm.submit(files.config, step=end_as(files, "stopped"), MAX_CRASHES="0") == 0
    assert slurm.submit(files.config, step="exit 1", MAX_CRASHES="0") == 1
    assert slurm.num_requeued == 2


BEATS = "import os, sys, time\nfor _ in range(900): os.utime(sys.argv[1]); time.sleep(0.1)"
"""What the heart of a run does with its lease."""


@pytest.mark.parametrize("job", ["41", "42"])
def test_a_folder_that_another_run_has_is_not_asked_for_again(slurm, files, job):
    files.run.mkdir()
    (files.run / "running.json").write_text(json.dumps({"restarts": {f"SLURM_JOB_ID={job}": 0}}))
    (files.run / "summary.json").write_text(json.dumps({"outcome": "running"}))
    heart = subprocess.Popen([sys.executable, "-c", BEATS, str(files.run / "running.json")])
    try:
        assert slurm.submit(files.config, step="exit 1") == (2 if job == "41" else 0), slurm.log.read_text()
    finally:
        heart.kill()
        heart.wait()
    assert slurm.num_requeued == int(job == "42")  # what is left of this job's own crash


def test_a_summary_counts_that_was_written_after_the_clock_was_set_back(slurm, files):
    files.run.mkdir()
    summary = files.run / "summary.json"
    summary.write_text(json.dumps({"outcome": "running"}))
    step = f"{end_as(files, 'refused')}".replace("; exit", f"; touch --date='1 hour ago' {summary}; exit")
    assert slurm.submit(files.config, step=step) == 2, slurm.log.read_text()


def test_a_config_that_is_refused_starts_no_task(slurm, files):
    assert slurm.submit(files.config, "--layout.tp=3") == 2
    assert "tp=3 does not divide" in slurm.log.read_text()
    assert slurm.calls == []


def test_the_log_says_if_tp_crosses_nodes(slurm, files):
    environment = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "a,b"}
    assert slurm.submit(files.config, "--layout.tp=2", step="exit 0", **environment) == 0, slurm.log.read_text()
    assert "note: tp=2 crosses nodes of 1 GPU," in slurm.log.read_text()


def test_a_job_that_slurm_ends_is_not_brought_back(slurm, files):
    step = f"end() {{ {end_as(files, 'stopped')}; }}; trap end TERM; touch {files.run}/is-there; sleep 60 & wait"
    with slurm.submitted(files.config, step=step) as process:
        deadline = time.monotonic() + 60
        while not (files.run / "is-there").exists():
            assert process.poll() is None and time.monotonic() < deadline, slurm.log.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        subprocess.run([slurm.folder / "bin" / "scancel", "--signal=TERM", "42"], env=slurm.environment, check=True)
        assert process.wait(timeout=30) == 3, slurm.log.read_text()
    assert slurm.num_requeued == 0 and "Slurm ends this job" in slurm.log.read_text()


def test_a_run_whose_time_is_up_saves_on_all_nodes_comes_again_and_ends(tmp_path, files):
    slurm = Slurm(tmp_path / "slurm", ["127.0.0.1", "127.0.0.2"])
    slurm.cwd = tmp_path / "here"
    caught = set_trap(slurm.cwd)
    with slurm.submitted(files.config) as process:
        wait_for_steps(process, files.run, 2, slurm.log)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=60) == 0, slurm.log.read_text()
    summary = read_summary(files.run)
    assert (summary["outcome"], summary["world_size"], slurm.num_requeued) == ("stopped", 2, 1), slurm.log.read_text()
    done = summary["steps"]
    assert (files.run / "checkpoints" / f"step-{done:08d}" / "state.json").exists() and done == len(
        read_lines(files.run)
    )
    assert slurm.submit(files.config, f"--train.steps={done + 2}") == 0, slurm.log.read_text()
    assert f"after {done} steps" in slurm.log.read_text()
    assert (read_summary(files.run)["outcome"], slurm.num_requeued) == ("done", 1)
    assert [line["step"] for line in read_lines(files.run)] == list(range(1, done + 3))
    assert list_caught(caught) == []


def test_without_arguments_it_says_how_it_is_used():
    ended = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "scripts/slurm.sbatch CONFIG.toml" in ended.stderr
