"""A run folder belongs to one run: a second one is refused, and what a crash left is taken over."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import ROOT, write_tiny
from waiting import wait_until

from dtlayout.base import lease
from dtlayout.base.errors import DtlayoutError, InvalidConfig
from dtlayout.base.lease import LEASE_NAME, Owner, hold
from dtlayout.base.process import is_stopped, name_process
from dtlayout.checkpoint import folder

QUICK = {"HEARTBEAT_S": 0.05, "EXPIRES_S": 0.6, "LOOKED_S": 0.15, "TRUSTED_S": 0.1, "SETTLE_S": 0.0}
"""Seconds, for the values that runs have."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hearts that beat fast, and a process that no launcher started."""
    for name, value in QUICK.items():
        monkeypatch.setattr(lease, name, value)
    for name in (*lease._STARTS, *lease._STARTS.values()):
        monkeypatch.delenv(name, raising=False)


def leave(folder: Path, **changes: object) -> Path:
    """The file of a run that ended without a word."""
    folder.mkdir(exist_ok=True)
    path = folder / LEASE_NAME
    path.write_text(json.dumps(asdict(replace(Owner.here(), **changes))))
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
            f"{Owner.here().host}, which began {began}; use another folder, or end that run"
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
        assert json.loads(path.read_text())["birth"] == Owner.here().birth
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
def test_a_later_start_of_the_same_run_is_told_by_its_launchers(monkeypatch, then, now, is_same):
    for name, value in now.items():
        monkeypatch.setenv(name, value)
    assert replace(Owner.here(), **ELSEWHERE, restarts=then).is_before(Owner.here()) == is_same


@contextmanager
def beating(path: Path, seconds: str = "time.time() + 3600") -> Iterator[None]:
    """A process that touches a file as a run elsewhere does, whose clock says what it likes."""
    beats = (
        "import os, sys, time; print('beats', flush=True)\n"
        f"while True: os.utime(sys.argv[1], (({seconds}), ({seconds}))); time.sleep(0.03)"
    )
    child = subprocess.Popen([sys.executable, "-c", beats, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "beats\n"
        yield
    finally:
        child.kill()
        child.communicate()


@pytest.mark.usefixtures("quick")
def test_a_run_elsewhere_whose_heart_beats_is_refused_and_one_that_is_silent_is_taken_over(tmp_path, capsys):
    path = leave(tmp_path, **ELSEWHERE)
    began = time.monotonic()
    with hold(tmp_path):
        assert 0.4 < time.monotonic() - began < 5
    assert "looking for its heartbeat, for " in capsys.readouterr().err

    text = leave(tmp_path, **ELSEWHERE).read_text()
    with beating(path), pytest.raises(InvalidConfig, match="belongs to another run: pid 4321 on node7, which began "):
        hold(tmp_path).__enter__()
    assert path.read_text() == text


@pytest.mark.usefixtures("quick")
def test_a_later_start_looks_for_less_long_and_a_heart_that_beats_wins_against_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lease, "EXPIRES_S", 1e6)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    path = leave(tmp_path, **ELSEWHERE, restarts={"TORCHELASTIC_RUN_ID=mine": 1})
    with beating(path), pytest.raises(InvalidConfig, match="belongs to another run: pid 4321 on node7"):
        hold(tmp_path).__enter__()
    capsys.readouterr()
    with hold(tmp_path):
        assert "for 0 s at most" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(0, 1000), own=st.integers(0, 1000), date=st.floats(-1e9, 1e9))
def test_a_process_that_is_seen_to_live_is_refused_to_whatever_restarts_and_clocks_say(monkeypatch, count, own, date):
    with TemporaryDirectory() as folder, monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "mine")
        patch.setenv("TORCHELASTIC_RESTART_COUNT", str(own))
        path = leave(Path(folder), restarts={"TORCHELASTIC_RUN_ID=mine": count})  # of this process, which lives
        moment = max(0.0, time.time() + date)
        os.utime(path, (moment, moment))
        with pytest.raises(InvalidConfig, match="belongs to another run"):
            hold(Path(folder)).__enter__()
        assert [each.name for each in Path(folder).iterdir()] == [LEASE_NAME]


@pytest.mark.usefixtures("quick")
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(date=st.one_of(st.sampled_from([0.0, -3600.0, 3600.0, 0.3, -0.3]), st.floats(-1e9, 1e9)))
def test_a_wait_is_as_long_as_the_manual_says_whatever_the_clock_was_set_to(monkeypatch, date):
    with TemporaryDirectory() as folder:
        path = leave(Path(folder), **ELSEWHERE)
        moment = max(0.0, time.time() + date)
        os.utime(path, (moment, moment))
        began = time.monotonic()
        with hold(Path(folder)):
            waited_s = time.monotonic() - began - lease.HEARTBEAT_S
        assert lease.LOOKED_S <= waited_s < lease.EXPIRES_S + 5.0


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seconds", ["time.time() - 7200", "time.time() + 7200", "1000 + time.monotonic()"])
def test_a_heart_that_beats_is_seen_whatever_its_clock_says(tmp_path, seconds):
    path = leave(tmp_path, **ELSEWHERE)
    with beating(path, seconds), pytest.raises(InvalidConfig, match="belongs to another run"):
        hold(tmp_path).__enter__()


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


CHILD = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from dtlayout.base import lease
from dtlayout.checkpoint import folder
from dtlayout.base.process import name_process
for name, value in {quick}.items():
    setattr(lease, name, value)
run = Path(sys.argv[1])
""".replace("{quick}", repr(QUICK))
"""What a process that holds a lease begins with."""


def start_child(code: str, run: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A process, once it has printed a line."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD + code, str(run), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=ROOT, env={**os.environ, **environment},
    )  # fmt: skip
    assert child.stdout.readline() == "held\n"
    return child


HOLDS = "with lease.hold(run): print('held', flush=True); time.sleep(60)"


def test_a_process_that_another_run_took_for_dead_ends_before_it_writes(tmp_path):
    error_file = tmp_path / "agent" / "attempt_0" / "0" / "error.json"
    error_file.parent.mkdir(parents=True)
    child = start_child(HOLDS, tmp_path / "run", TORCHELASTIC_ERROR_FILE=str(error_file))
    own = leave(tmp_path / "run", host="node8")
    _, said = child.communicate(timeout=20)
    assert child.returncode == 2
    assert said.startswith(f"{tmp_path / 'run'} was taken over by pid ") and "on node8" in said
    assert json.loads(own.read_text())["host"] == "node8"
    assert (tmp_path / "agent" / "dtlayout-refused").read_text() == said.strip()  # torchrun's next starts end too


@pytest.mark.usefixtures("quick")
def test_a_folder_that_is_moved_during_a_run_ends_it_and_goes_on_in_its_new_place_at_once(tmp_path, capsys):
    run, moved = tmp_path / "run", tmp_path / "moved"
    child = start_child(HOLDS, run)
    run.rename(moved)
    _, said = child.communicate(timeout=20)
    assert (child.returncode, said) == (
        2,
        f"{run} was moved to '{moved}' while this run wrote there: ended; it goes on with train.run_folder of the new "
        "place\n",
    )
    assert not run.exists() and list(moved.iterdir()) == []
    with hold(moved):
        assert capsys.readouterr().err == ""


def test_a_folder_that_is_deleted_during_a_run_ends_it_and_another_one_there_is_not_written(tmp_path):
    run = tmp_path / "run"
    child = start_child(HOLDS, run)
    run.rename(tmp_path / "away")
    run.mkdir()
    (tmp_path / "away" / LEASE_NAME).unlink()
    (tmp_path / "away").rmdir()
    _, said = child.communicate(timeout=20)
    assert (child.returncode, said) == (2, f"{run} was deleted while this run wrote there: ended\n")
    assert list(run.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_a_lease_that_somebody_removed_is_put_back_and_one_that_was_emptied_is_nobodys(tmp_path, capsys):
    with hold(tmp_path) as held:
        (tmp_path / LEASE_NAME).write_text("")
        held.check()
        (tmp_path / LEASE_NAME).unlink()
        held.check()
        assert (tmp_path / LEASE_NAME).read_text() == held.text
        assert capsys.readouterr().err.endswith("was removed, and this run still writes here: put back\n")
        with pytest.raises(InvalidConfig, match="belongs to another run"):
            hold(tmp_path).__enter__()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_a_look_that_fails_says_so_and_one_after_a_heartbeat_is_not_needed(tmp_path, monkeypatch):
    with hold(tmp_path) as held:
        (tmp_path / LEASE_NAME).rename(tmp_path / "kept")
        (tmp_path / LEASE_NAME).mkdir()  # what is there cannot be read
        with pytest.raises(IsADirectoryError):
            held.check()
        held._last_heartbeat_s = lease._now()
        held.check(1000.0)
        (tmp_path / LEASE_NAME).rmdir()


FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
if len(sys.argv) > 2:
    def refuse(*_): raise PermissionError(1, "no links here")
    os.link = refuse
try:
    lease.hold(run).__enter__()
except Exception as error:
    print(error)
"""
"""A disk on which a file has no more than 20 bytes."""


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("arguments", [(), ("no links",)])
def test_a_full_disk_leaves_no_lease_for_which_the_next_start_would_wait(tmp_path, arguments):
    run = tmp_path / "run"
    command = [sys.executable, "-c", CHILD + FULL, str(run), *arguments]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said == f"train.run_folder='{run}' cannot be written: File too large\n"
    assert list(run.iterdir()) == []
    text = leave(run, pid=end_child()).read_text()  # and one that is taken over stays what it was
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "File too large" in said and (run / LEASE_NAME).read_text() == text
    assert [path.name for path in run.iterdir()] == [LEASE_NAME]


@pytest.mark.usefixtures("quick")
def test_a_filesystem_without_links_has_leases_too_and_leaves_no_half_of_one(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(lease.os, "link", refuse)
    with hold(tmp_path), pytest.raises(InvalidConfig, match="belongs to another run"):
        hold(tmp_path).__enter__()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(lease, "_write_beside", lambda path, text: tmp_path / "none")
    with pytest.raises(TypeError):
        lease._create_in_place(tmp_path / LEASE_NAME, None)
    (tmp_path / LEASE_NAME).unlink()


STALLS = """
lease._find_machine = lambda: "another boot"  # nobody here sees its process
checkpoints, moment = run / "checkpoints", sys.argv[2]
step = checkpoints / "step-00000007"

def stall(name):
    if name == moment:
        print("held", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)

def replace(source, target):
    if Path(source) == step:
        stall("before the old one is moved away")
        os.replace(source, target)
        time.sleep(0.5)  # the heart beats meanwhile, and finds the folder lost
        return
    if Path(target) == step and "partial" in Path(source).name:
        stall("before the rename")
    os.replace(source, target)

with lease.hold(run) as held:
    def look():
        stall("before the look")
        held.check()

    partial = folder.name_partial(checkpoints, 7, name_process())
    folder.make_empty(partial, lambda: None)
    (partial / "writer").write_text("A")
    if len(sys.argv) > 3:
        step.mkdir()
    folder.os = SimpleNamespace(**{**vars(os), "replace": replace})
    folder.publish(partial, step, 2, look)
"""
"""A run elsewhere that is about to publish step 7, and stands still at the worst moment."""


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("moment", ["before the look", "before the rename", "before the old one is moved away"])
@pytest.mark.parametrize("is_whole", [False, True])
def test_one_who_stood_still_before_a_rename_publishes_nothing_of_the_one_who_took_over(tmp_path, moment, is_whole):
    """The other one is in its save of the same step then, or has published it."""
    checkpoints = tmp_path / "checkpoints"
    step = folder.name_checkpoint(checkpoints, 7)
    child = start_child(STALLS, tmp_path, moment, *(["again"] if "old" in moment else []))
    wait_until(lambda: is_stopped(child.pid))
    try:
        with hold(tmp_path) as held:
            folder.clean(checkpoints, held.check)
            partial = folder.name_partial(checkpoints, 7, name_process())
            folder.make_empty(partial, held.check)
            (partial / "half").write_text("B")
            if is_whole:
                (partial / "half").rename(partial / "writer")
                folder.publish(partial, step, 2, held.check)
            child.send_signal(signal.SIGCONT)
            _, said = child.communicate(timeout=20)
            assert child.returncode != 0, said
            if not is_whole:
                assert (partial / "half").read_text() == "B"
                assert not (step / "half").exists() and not (step / "writer").exists()
                (partial / "half").rename(partial / "writer")
                folder.publish(partial, step, 2, held.check)
            assert (step / "writer").read_text() == "B"
            held.check()
    finally:
        child.kill()
        child.communicate()


AGENT_STARTS = """
import types
from dtlayout import launch

def train(config, layout, stop, lease):
    for _ in range(100):
        lease.check()
        with (Path(config.train.run_folder) / "writers").open("a") as file:
            file.write(f"{os.getpid()}\\n")
        if (Path(config.train.run_folder).parent / "enough").exists():
            break
        time.sleep(0.1)
    return 0

sys.modules["dtlayout.training.run"] = types.SimpleNamespace(train=train)
launch.SECONDS_TO_SAY_WHY = 0.0
sys.exit(launch.main(sys.argv[1:]))
"""
"""A rank of one process that does what train.py does, and then writes its name again and again for an answer."""


class Agent:
    """Starts a rank as torchrun does, and again after each exit code but 0; all agents have the same --rdzv-id."""

    def __init__(self, config: Path, folder: Path, max_restarts: int, *, has_errors: bool):
        self.codes, self.said = [], []
        self.process = None
        for count in range(max_restarts + 1):
            error_file = folder / f"attempt_{count}" / "0" / "error.json"
            error_file.parent.mkdir(parents=True)
            environment = {**os.environ, "TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": str(count)}
            environment |= {"TORCHELASTIC_ERROR_FILE": str(error_file)} if has_errors else {}
            command = [sys.executable, "-c", CHILD.replace("run = Path", "Path") + AGENT_STARTS, str(config)]
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
            if max_restarts == 0:
                return
            self.wait()
            if self.codes[-1] == 0:
                return

    def wait(self) -> None:
        """Until the rank that runs has ended."""
        self.said.append(self.process.communicate(timeout=60)[1])
        self.codes.append(self.process.returncode)


@pytest.mark.parametrize("has_errors", [True, False])
def test_two_torchruns_with_one_rdzv_id_do_not_steal_a_folder_from_each_other(tmp_path, has_errors):
    """The larger restart count is that of the second one, which is refused and restarted."""
    files = write_tiny(tmp_path)
    first = Agent(files.config, tmp_path / "first", 0, has_errors=has_errors)
    try:
        wait_until(lambda: (files.run / "writers").exists())
        second = Agent(files.config, tmp_path / "second", 2, has_errors=has_errors)
        (tmp_path / "enough").touch()
        first.wait()
    finally:
        first.process.kill()
        first.process.wait()
    assert first.codes == [0] and "taken over" not in first.said[0]
    assert set((files.run / "writers").read_text().split()) == {str(first.process.pid)}
    assert second.codes == [2, 2, 2]
    refusal = f"train.run_folder='{files.run}' belongs to another run: pid {first.process.pid} on "
    assert second.said[0].startswith(refusal)
    for said in second.said[1:]:
        assert said.startswith(f"not tried again: {refusal}" if has_errors else refusal) and said.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(DtlayoutError, match=f"train.run_folder='{tmp_path / 'run'}' cannot be written: "):
        hold(tmp_path / "run").__enter__()


def test_a_link_to_where_nothing_is_mounted_is_named(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "scratch")
    with pytest.raises(DtlayoutError, match=r"is a link to '.*scratch', which is not there"), hold(tmp_path / "run"):
        pass
    (tmp_path / "scratch").mkdir()
    with hold(tmp_path / "run"):
        assert (tmp_path / "scratch" / LEASE_NAME).exists()
