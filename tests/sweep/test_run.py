"""A sweep keeps how every trial ended and why, leaves no process, and goes on after any end of its own."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections import Counter

import pytest
from sweeping import FAKE, read_starts, write_sweep
from tiny import write_tiny
from waiting import wait_until

from dtlayout.cli import main
from dtlayout.config.loading import load_config
from dtlayout.planner.prediction import own_scenario
from dtlayout.records.run import Performance, Run
from dtlayout.spec.cluster import find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.sweep import processes
from dtlayout.sweep.results import Journal, TrialResult, sort_by_time

CAUSES = {
    "oom": "CUDA out of memory. Tried to allocate 2.00 GiB",
    "crashed": "ValueError: seed 2 is unlucky",
    "hung": "no end within the time limit; 2 steps were done",
    "killed": "a process was ended by SIGKILL; 2 steps were done",
    "non_finite": "6 steps were done",
    "refused": "tp is too large",
}


def test_trials_are_kept_with_every_cause_and_leave_no_process(tmp_path, capsys):
    folder = tmp_path / "out"
    assert main(["sweep", str(write_sweep(tmp_path, seeds=20)), "--folder", str(folder), "--json"]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert Counter(t["outcome"] for t in trials) == {"ok": 14} | dict.fromkeys(CAUSES, 1)
    by_seed = {int(t["overrides"][0].partition("=")[2]): t for t in trials}
    for seed, trial in by_seed.items():
        if trial["outcome"] == "ok":
            measured, predicted = trial["run"]["measured"], trial["run"]["predicted"]
            assert measured["step_time_s"] == pytest.approx(0.1 + 0.001 * seed)  # the slow ones don't count
            assert measured["peak_memory_bytes"] == [1000 + seed] and trial["steps"] == 6
            assert trial["log"] == [] and predicted["peak_memory_bytes"][0] > 0
            assert predicted["step_time_s"] is None, "nobody calibrated this CPU"
    for seed in range(1, 7):
        assert CAUSES[by_seed[seed]["outcome"]] in by_seed[seed]["cause"]
    assert by_seed[2]["log"][-1] == "ValueError: seed 2 is unlucky"
    assert read_starts(folder) == Counter(range(20))
    assert processes.find(str(folder.resolve())) == []


def test_a_sweep_that_was_killed_goes_on_and_runs_nothing_twice(tmp_path, capsys):
    path, folder = write_sweep(tmp_path, seeds=12, timeout_s=600), tmp_path / "out"
    command = [sys.executable, "-c", "import sys; from dtlayout.cli import main; sys.exit(main())", "sweep", str(path)]
    sweep = subprocess.Popen([*command, "--folder", str(folder)], stderr=subprocess.DEVNULL)
    wait_until(lambda: (folder / "starts.txt").exists() and 3 in read_starts(folder))  # which hangs
    ended = Journal(folder).read()
    sweep.kill()
    sweep.wait()
    with (folder / "trials.jsonl").open("a") as file:
        file.write('{"key": "to')  # as a kill in the middle of a line leaves it
    path.write_text(path.read_text().replace("timeout_s = 600", "timeout_s = 15"))
    assert main(["sweep", str(path), "--folder", str(folder), "--json"]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert len(trials) == 12 and len(ended) < 12
    starts = read_starts(folder)
    assert starts.pop(3) == 2  # the one that was cut off
    assert set(starts.values()) == {1}
    assert processes.find(str(folder.resolve())) == []
    assert len(Journal(folder).read()) == 12


def test_a_trial_ends_with_its_sweep_however_that_ended(tmp_path):
    """Without a second sweep that cleans up: Linux ends the trial."""
    path, folder = write_sweep(tmp_path, seeds=1, timeout_s=600), tmp_path / "out"
    path.write_text(path.read_text().replace(f"'{FAKE}'", "-c 'import time; time.sleep(600)'"))
    command = [sys.executable, "-c", "import sys; from dtlayout.cli import main; sys.exit(main())", "sweep", str(path)]
    sweep = subprocess.Popen([*command, "--folder", str(folder)], stderr=subprocess.DEVNULL)
    wait_until(lambda: len(processes.find(str(folder.resolve()))) > 0)
    sweep.kill()
    sweep.wait()
    wait_until(lambda: processes.find(str(folder.resolve())) == [])


def test_a_trial_that_had_ended_when_the_sweep_was_killed_is_taken_from_its_folder(tmp_path, capsys):
    path, folder = write_sweep(tmp_path, seeds=1), tmp_path / "out"
    for _ in range(2):
        assert main(["sweep", str(path), "--folder", str(folder)]) == 0
        (folder / "trials.jsonl").unlink()
    assert read_starts(folder) == {0: 1}


def test_a_stop_ends_the_trial_and_keeps_it_for_the_next_time(tmp_path):
    path, folder = write_sweep(tmp_path, seeds=4, timeout_s=600), tmp_path / "out"
    command = [sys.executable, "-c", "import sys; from dtlayout.cli import main; sys.exit(main())", "sweep", str(path)]
    sweep = subprocess.Popen([*command, "--folder", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: (folder / "starts.txt").exists() and 3 in read_starts(folder))
    sweep.send_signal(signal.SIGINT)
    assert sweep.wait(30) == 3
    assert processes.find(str(folder.resolve())) == []
    assert 3 not in {int(r.overrides[0].partition("=")[2]) for r in Journal(folder).read().values()}


def test_impossible_layouts_and_misfits_are_results_too(tmp_path, capsys):
    path, folder = write_sweep(tmp_path, seeds=1), tmp_path / "out"
    text = (
        path.read_text().replace("--train.device=cpu", "--cluster.gpu=a100-80g-sxm").replace("[axes.train]", "[axes]")
    )
    path.write_text(text.replace("seed = [0]", "layout.tp = [1, 3]\nmodel.vocab_size = [260, 1_000_000_000]"))
    assert main(["sweep", str(path), "--folder", str(folder), "--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(listed) == ["impossible", "impossible", "oom", "run"]
    assert main(["sweep", str(path), "--folder", str(folder), "--json"]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert Counter(t["outcome"] for t in trials) == {"ok": 1, "skipped": 1, "refused": 2}
    causes = {t["outcome"]: t["cause"] for t in trials}
    assert "tp=3 does not divide" in causes["refused"] and "predicted to need" in causes["skipped"]
    assert main(["sweep", str(path), "--folder", str(folder), "--try-oom", "--json"]) == 0
    outcomes = Counter(t["outcome"] for t in json.loads(capsys.readouterr().out)["trials"])
    assert outcomes == {"ok": 2, "refused": 2}


def test_two_sweeps_do_not_run_in_one_folder(tmp_path, capsys):
    path, folder = write_sweep(tmp_path, seeds=1), tmp_path / "out"
    folder.mkdir()
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["sweep", str(path), "--folder", str(folder)]) == 2
    assert "another sweep runs in" in capsys.readouterr().err
    assert main(["sweep", str(path), "--folder", str(folder)]) == 0


def test_what_ended_badly_is_run_again_when_asked(tmp_path, capsys):
    path, folder = write_sweep(tmp_path, seeds=3), tmp_path / "out"
    for _ in range(2):
        assert main(["sweep", str(path), "--folder", str(folder)]) == 0
    assert main(["sweep", str(path), "--folder", str(folder), "--retry", "crashed"]) == 0
    assert read_starts(folder) == {0: 1, 1: 1, 2: 2}  # the third crashes
    assert main(["sweep", str(path), "--folder", str(folder), "--retry", "cursed"]) == 2
    assert "--retry=cursed cannot be tried again; use oom" in capsys.readouterr().err


def test_a_folder_that_cannot_be_used_is_refused_in_a_line(tmp_path, capsys):
    path = write_sweep(tmp_path, seeds=1)
    (tmp_path / "file").write_text("")
    assert main(["sweep", str(path), "--folder", str(tmp_path / "file" / "out")]) == 2
    assert "cannot be made a folder" in capsys.readouterr().err
    for line, why in (
        ('{"key": "a"}', "no 'run' in a line"),
        ('{"key": "a", "run": {"format": 0}, "outcome": "ok"}', "run.format=0, and this version of dtlayout reads 1"),
    ):
        (tmp_path / "trials.jsonl").write_text(f"{line}\n")
        assert main(["sweep", str(path), "--folder", str(tmp_path)]) == 2
        assert f"is not what a sweep of this version writes: {why}" in capsys.readouterr().err


def test_the_fastest_comes_first_and_what_did_not_run_is_no_candidate(tmp_path):
    def result(key: str, step_time_s: float | None, outcome="ok") -> TrialResult:
        config = load_config(write_tiny(tmp_path).config)
        run = Run(
            table="", row=key, scenario=own_scenario(config, 1, find_gpu("cpu")), layout=Layout(), kernels=Kernels(),
            outcome=outcome, measured=Performance(step_time_s=step_time_s),
        )  # fmt: skip
        return TrialResult(key=key, setting=key, overrides=(), run=run)

    found = sort_by_time([result("a", 2.0), result("b", 1.0), result("c", 0.5, "hung"), result("d", None, "crashed")])
    assert [r.key for r in found] == ["b", "a"]


def test_a_process_that_ignores_sigterm_is_ended_too(tmp_path):
    mark = f"test-{os.getpid()}"
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(600)"
    with (tmp_path / "log").open("wb") as output:
        process = processes.start([sys.executable, "-c", code], output, mark)
    wait_until(lambda: (tmp_path / "log").read_text() == "ready\n")
    processes.end(mark, process, grace_s=0.3)
    assert process.returncode == -signal.SIGKILL
    assert processes.find(mark) == []
