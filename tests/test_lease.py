"""A run folder belongs to one run: a second one is refused, and what a crash left is taken over."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dtlayout import lease
from dtlayout.errors import DtlayoutError, InvalidConfig
from dtlayout.lease import LEASE_NAME, Holder, hold


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hearts that beat fast, and a process that no launcher started."""
    for name, value in (("BEAT_S", 0.05), ("EXPIRES_S", 0.6), ("SETTLE_S", 0.0)):
        monkeypatch.setattr(lease, name, value)
    for name in (*lease._STARTS, *lease._STARTS.values()):
        monkeypatch.delenv(name, raising=False)


def leave(folder: Path, **changes: object) -> Path:
    """The file of a run that ended without a word."""
    folder.mkdir(exist_ok=True)
    path = folder / LEASE_NAME
    path.write_text(json.dumps(asdict(replace(Holder.here(), **changes))))
    return path


def end_child() -> int:
    """The pid of a process that is gone."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


ELSEWHERE = {"host": "node7", "machine": "another boot", "pid": 4321}


@pytest.mark.usefixtures("quick")
def test_a_second_run_is_refused_with_the_name_of_the_first_which_leaves_nothing(tmp_path):
    with hold(tmp_path / "run"):
        began = json.loads((tmp_path / "run" / LEASE_NAME).read_text())["began"]
        with pytest.raises(InvalidConfig) as caught, hold(tmp_path / "run"):
            pytest.fail("two have it")
        assert str(caught.value) == (
            f"train.run_folder='{tmp_path / 'run'}' belongs to another run: pid {os.getpid()} on "
            f"{Holder.here().host}, which began {began}; use another folder, or end that run"
        )
    assert list((tmp_path / "run").iterdir()) == []
    with hold(tmp_path / "run"):  # as often as one likes
        pass


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("changes", [{"birth": "1"}, {"pid": None}])
def test_a_process_that_is_gone_or_another_one_by_now_is_taken_over_at_once(tmp_path, capsys, monkeypatch, changes):
    monkeypatch.setattr(lease, "EXPIRES_S", 1e6)
    pid = end_child()
    path = leave(tmp_path, **{name: value or pid for name, value in changes.items()})
    with hold(tmp_path):
        assert json.loads(path.read_text())["birth"] == Holder.here().birth
    assert "was left by a run that is gone: taken over" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_a_process_that_is_dead_and_not_waited_for_is_gone():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert lease.find_birth(child.pid)
    child.kill()
    deadline = time.monotonic() + 10
    while lease.find_birth(child.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lease.find_birth(child.pid) == ""
    child.communicate()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("then", "now", "is_same"),
    [
        ({}, {"TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
        ({"TORCHELASTIC_RUN_ID=job7": 0}, {"TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "1"}, True),
        ({"TORCHELASTIC_RUN_ID=job7": 1}, {"TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
        ({"TORCHELASTIC_RUN_ID=none": 0}, {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
        ({"SLURM_JOB_ID=12": 0}, {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_JOB_ID=12": 0}, {"SLURM_JOB_ID": "12"}, False),
    ],
)
def test_a_later_start_of_the_same_run_takes_over_without_a_look(monkeypatch, then, now, is_same):
    for name, value in now.items():
        monkeypatch.setenv(name, value)
    assert replace(Holder.here(), **ELSEWHERE, restarts=then).is_gone(Holder.here()) == is_same


@pytest.mark.usefixtures("quick")
def test_a_run_elsewhere_whose_heart_beats_is_refused_and_one_that_is_silent_is_taken_over(tmp_path, capsys):
    path = leave(tmp_path, **ELSEWHERE)
    began = time.monotonic()
    with hold(tmp_path):
        assert 0.4 < time.monotonic() - began < 5
    assert "looking for its heartbeat, for " in capsys.readouterr().err

    path = leave(tmp_path, **ELSEWHERE)
    os.utime(path, (0, time.time() - 60))
    with hold(tmp_path):  # silent for long
        assert "looking for" not in capsys.readouterr().err

    text = leave(tmp_path, **ELSEWHERE).read_text()
    beats = "import os, sys, time\nfor _ in range(200): os.utime(sys.argv[1]); time.sleep(0.05)"
    child = subprocess.Popen([sys.executable, "-c", beats, str(path)])
    try:
        with pytest.raises(InvalidConfig, match="belongs to another run: pid 4321 on node7, which began "):
            hold(tmp_path).__enter__()
    finally:
        child.kill()
        child.wait()
    assert path.read_text() == text


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("text", ["", "{", '{"pid": 3}'])
def test_a_file_that_says_nothing_expires_too(tmp_path, text):
    (tmp_path / LEASE_NAME).write_text(text)
    with hold(tmp_path):
        assert json.loads((tmp_path / LEASE_NAME).read_text())["pid"] == os.getpid()


@pytest.mark.usefixtures("quick")
def test_the_heart_beats_as_long_as_the_block_lasts(tmp_path):
    with hold(tmp_path):
        first = (tmp_path / LEASE_NAME).stat().st_mtime_ns
        deadline = time.monotonic() + 10
        while (tmp_path / LEASE_NAME).stat().st_mtime_ns == first:
            assert time.monotonic() < deadline, "no heartbeat"
            time.sleep(0.02)


def test_a_process_that_another_run_took_for_dead_ends_before_it_writes(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from dtlayout import lease; lease.BEAT_S = 0.05\n"
        "with lease.hold(Path(sys.argv[1])): print('held', flush=True); time.sleep(30)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "held\n"
    own = leave(tmp_path, host="node8")
    _, said = child.communicate(timeout=20)
    assert child.returncode == 2
    assert said.startswith(f"{tmp_path} was taken over by pid ") and "on node8" in said
    assert json.loads(own.read_text())["host"] == "node8"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(DtlayoutError, match=f"train.run_folder='{tmp_path / 'run'}' cannot be written: "):
        hold(tmp_path / "run").__enter__()
