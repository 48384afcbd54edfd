"""Trackers get every number once, over resumes too; one that fails is dropped, and nothing of them stays behind."""

import os
import signal
import socket
import sys
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from tiny import write_tiny
from tracked import list_wandb_processes, read_tensorboard, read_wandb

from dtlayout.base.errors import InvalidConfig, InvalidLayout
from dtlayout.cli import main
from dtlayout.config.checking import check_layout
from dtlayout.config.loading import load_config
from dtlayout.spec.kernel_records import Package
from dtlayout.spec.trackers import TRACKERS, Tracker, register_tracker
from dtlayout.training.metrics import StepMetrics
from dtlayout.training.trackers import Start, Trackers, name_numbers

CONFIG = {"model": {"name": "tiny"}, "layout": {"stage_layers": (3, 4)}}


def metrics(step: int, **others) -> StepMetrics:
    usual = StepMetrics(
        step=step, loss=2.0 / step, grad_norm=0.5, lr=1e-3, tokens=128 * step, step_time_s=0.25, tokens_per_s=512.0,
        tokens_per_s_per_gpu=256.0, model_tflops_per_gpu=0.125, mfu=None, peak_memory_bytes=None,
    )  # fmt: skip
    return replace(usual, **others)


def track(name: str, folder: Path, steps: list[StepMetrics], *, done: int = 0, noted: int = 0, is_killed=False):
    """One session; what it said. A killed one is left without a word, as far as one process can."""
    said: list[str] = []
    trackers = Trackers(said.append)
    trackers.open([name], Start(folder=folder, config=CONFIG, done=done, noted=noted))
    for each in steps:
        trackers.write(each)
    if not is_killed:
        trackers.close(is_fine=True)
    return said


@pytest.fixture
def offline(monkeypatch):
    """W&B where nobody may listen: every way to the network ends at a socket that counts; the connections."""
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def count() -> None:
            while True:
                try:
                    connections.append(server.accept()[1])
                except OSError:  # closed
                    return

        thread = threading.Thread(target=count, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "WANDB_BASE_URL"):
            monkeypatch.setenv(name, address)
            monkeypatch.setenv(name.lower(), address)
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("NO_PROXY", "")
        monkeypatch.setenv("no_proxy", "")
        yield connections
        server.shutdown(socket.SHUT_RDWR)
    thread.join(timeout=5)


def test_every_number_of_a_step_has_a_name_and_what_was_not_measured_has_none():
    of_experts = {
        "fullest_expert": 1.5, "fullest_expert_block": 3, "expert_imbalance": 1.2, "router_entropy": 2.0,
        "router_square": 4.0, "loss_scale": 8.0,
    }  # fmt: skip
    sets = {"validation_loss": 1.5, "validation_losses": {"code": 1.5, "web": 2.5}}
    named = name_numbers(metrics(1, mfu=0.5, peak_memory_bytes=7, peak_reserved_bytes=9, **sets, **of_experts))
    assert (named.pop("validation/code"), named.pop("validation/web")) == (1.5, 2.5)
    assert len(named) == len(fields(StepMetrics)) - 3, "the step is where it stands, the layout and sets are no numbers"
    assert (named["train/loss"], named["validation/loss"], named["speed/mfu"]) == (2.0, 1.5, 0.5)
    assert (named["memory/peak_memory_bytes"], named["speed/tokens_per_s"], named["train/tokens"]) == (7, 512.0, 128)
    assert named.keys() - name_numbers(metrics(1)).keys() == {
        "speed/mfu", "memory/peak_memory_bytes", "memory/peak_reserved_bytes", "validation/loss",
        "experts/fullest", "experts/fullest_block",
        "experts/imbalance", "experts/entropy", "experts/square", "train/loss_scale",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ('["tensorbord"]', r"metrics.to has 'tensorbord', which is unknown; did you mean 'tensorboard'\?"),
        ('["mlflow"]', r"metrics.to has 'mlflow', which is unknown; use one of \['tensorboard', 'wandb'\]"),
        ('["wandb", "tensorboard", "wandb"]', "metrics.to has 'wandb' twice"),
        ("wandb", "metrics.to='wandb' must be a list"),
    ],
)
def test_a_name_that_is_no_tracker_is_refused(tmp_path, override, problem):
    with pytest.raises(InvalidConfig, match=problem) as caught:
        load_config(write_tiny(tmp_path).config, [f"--metrics.to={override}"])
    assert len(caught.value.problems) == 1


def test_a_tracker_that_is_not_installed_is_refused_where_it_runs_and_noted_where_it_is_checked(
    tmp_path, monkeypatch, capsys
):
    override, path = '--metrics.to=["tensorboard", "wandb"]', write_tiny(tmp_path).config
    config = load_config(path, [override])
    check_layout(config, 1)
    monkeypatch.setattr("dtlayout.spec.kernel_table.find_spec", lambda module: None)
    expected = [
        f"metrics.to has {name!r}: no package {name} here; install it: pip install 'dtlayout[{name}]'"
        for name in ("tensorboard", "wandb")
    ]
    with pytest.raises(InvalidLayout) as caught:
        check_layout(config, 1)
    assert caught.value.problems == expected
    assert main(["check", str(path), "--world", "1", override]) == 0  # the run may be elsewhere
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")] == [
        f"note: {problem}" for problem in expected
    ]


def test_the_extra_that_is_advised_exists_and_tests_install_it():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for tracker in TRACKERS.values():
        assert f"pip install 'dtlayout[{tracker.name}]'" == tracker.package.install
        assert text.count(f'\n{tracker.name} = ["{tracker.package.module}>=') == 1
        assert text.count(f'"{tracker.package.module}>=') == 2


def test_tensorboard_shows_every_step_once_after_a_kill_and_a_resume(tmp_path):
    killed = [metrics(step, loss=9.0) for step in range(1, 6)]
    said = track("tensorboard", tmp_path, killed)
    assert said == [f"tensorboard: tensorboard --logdir {tmp_path / 'tensorboard'}"]
    resumed = [metrics(step, validation_loss=3.0 if step == 6 else None) for step in range(4, 7)]
    track("tensorboard", tmp_path, resumed, done=3, noted=5)
    shown = read_tensorboard(tmp_path)
    assert shown["train/loss"] == pytest.approx({1: 9.0, 2: 9.0, 3: 9.0, 4: 0.5, 5: 0.4, 6: 1 / 3})
    assert shown["validation/loss"] == {6: 3.0}
    assert shown.keys() == name_numbers(resumed[-1]).keys()
    (events, _) = (path.read_bytes() for path in sorted((tmp_path / "tensorboard").iterdir()))
    assert b'    name = "tiny"' in events and b"    stage_layers = [3, 4]" in events


def test_wandb_offline_goes_on_with_one_run_touches_no_network_and_leaves_no_process(tmp_path, offline):
    folder = tmp_path / "my-run"
    folder.mkdir()
    said = track("wandb", folder, [metrics(step) for step in range(1, 6)])
    assert said == [f"wandb: wandb sync {folder}/wandb/offline-run-*"]
    assert list_wandb_processes() == []
    # A kill after five steps whose newest checkpoint is of the third: steps 4 and 5 are there.
    track("wandb", folder, [metrics(step) for step in range(4, 8)], done=3, noted=5)
    assert list_wandb_processes() == []
    (config, first), (_, second) = read_wandb(folder)
    assert config["model"] == {"name": "tiny"} and config["layout"] == {"stage_layers": [3, 4]}
    assert (list(first), list(second)) == ([1, 2, 3, 4, 5], [6, 7])
    assert second[7] == name_numbers(metrics(7))
    run_id = (folder / "wandb" / "run-id").read_text()
    sessions = [path for path in (folder / "wandb").iterdir() if path.is_dir() and not path.is_symlink()]
    # offline-run-TIME-ID, and -1 after that for a second one in the same second.
    assert {path.name.split("-")[3] for path in sessions} == {run_id}
    assert sorted(path.name for path in folder.iterdir()) == ["wandb"]
    assert offline == []


def test_wandb_that_dies_in_the_middle_is_named_once_and_dropped(tmp_path, offline):
    said: list[str] = []
    trackers = Trackers(said.append)
    trackers.open(["wandb"], Start(folder=tmp_path, config=CONFIG, done=0, noted=0))
    trackers.write(metrics(1))
    (core,) = list_wandb_processes()
    os.kill(core, signal.SIGKILL)
    deadline = time.monotonic() + 20
    for step in range(2, 1000):  # until it is noticed
        trackers.write(metrics(step))
        if len(said) > 1 or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    trackers.write(metrics(1000))
    trackers.close(is_fine=True)
    assert len(said) == 2 and list_wandb_processes() == []
    assert said[1].startswith("note: wandb failed after step ") and said[1].endswith("; metrics.jsonl has everything")


class FakeRun:
    """Of a server that has ten steps."""

    offline, step, url = False, 11, "https://wandb.example/run"

    def __init__(self):
        self.logged, self.exit_code = [], None

    def log(self, numbers, step, commit):
        self.logged.append(step)

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.mark.parametrize("is_fine", [True, False])
def test_online_a_server_says_which_step_comes_next_and_is_told_how_the_run_ended(tmp_path, monkeypatch, is_fine):
    run, asked, torn_down = FakeRun(), {}, []
    fake = SimpleNamespace(
        init=lambda **arguments: asked.update(arguments) or run, Settings=dict, teardown=lambda: torn_down.append(run)
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "run-id").write_text("1a2b")
    said: list[str] = []
    trackers = Trackers(said.append)
    trackers.open(["wandb"], Start(folder=tmp_path, config=CONFIG, done=8, noted=12))
    for step in range(9, 14):
        trackers.write(metrics(step))
    trackers.close(is_fine=is_fine)
    assert run.logged == [11, 12, 13]
    assert (asked["id"], asked["resume"], asked["project"]) == ("1a2b", "allow", "mine")
    assert (asked["name"], asked["dir"], asked["config"]) == (tmp_path.name, str(tmp_path), CONFIG)
    assert said == ["wandb: https://wandb.example/run"]
    assert (run.exit_code, torn_down) == (0 if is_fine else 1, [run])


class Failing:
    """Fails where its config says."""

    where = "nowhere"

    def __init__(self, start: Start):
        self.fails = start.config["fails"]
        self.written: list[int] = []
        if "open" in self.fails:
            raise OSError("no\nserver")

    def write(self, step, numbers):
        if f"write {step}" in self.fails:
            raise RuntimeError("network is\tgone")
        self.written.append(step)

    def close(self, *, is_fine):
        if "close" in self.fails:
            raise ValueError


@pytest.mark.parametrize(
    ("fails", "problem", "written"),
    [
        ("open", "cannot be opened: OSError: no server", None),
        ("write 2", "failed after step 2 and is dropped: RuntimeError: network is gone", [1]),
        ("close", "was not closed: ValueError: no reason given", [1, 2, 3]),
        ("", None, [1, 2, 3]),
    ],
)
def test_a_tracker_that_fails_is_said_once_and_the_others_go_on(tmp_path, fails, problem, written):
    said: list[str] = []
    trackers = Trackers(said.append)
    with mock.patch.dict(TRACKERS):
        register_tracker(Tracker(name="failing", package=Package("sys", ""), session=f"{__name__}:Failing"))
        start = Start(folder=tmp_path, config={"fails": fails}, done=0, noted=0)
        trackers.open(["failing", "tensorboard"], start)
    session = trackers.sessions.get("failing")
    for step in (1, 2, 3):
        trackers.write(metrics(step))
    trackers.close(is_fine=True)
    notes = [line for line in said if line.startswith("note")]
    assert notes == ([f"note: failing {problem}; metrics.jsonl has everything"] if problem else [])
    assert (session and session.written) == written
    assert list(read_tensorboard(tmp_path)["train/loss"]) == [1, 2, 3]


def test_a_name_that_is_taken_is_refused():
    with pytest.raises(InvalidConfig, match="the tracker 'wandb' is there already; give yours another name"):
        register_tracker(TRACKERS["wandb"])


def test_nothing_is_opened_where_nothing_is_asked_for(tmp_path):
    said: list[str] = []
    trackers = Trackers(said.append)
    trackers.open([], Start(folder=tmp_path, config=CONFIG, done=0, noted=0))
    trackers.write(metrics(1))
    trackers.close(is_fine=True)
    assert said == [] and list(tmp_path.iterdir()) == []
