"""What a run refuses after it has been built."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtlayout.batch import Batch
from dtlayout.config import parse_config
from dtlayout.device import Device
from dtlayout.errors import CheckpointError, InvalidConfig, KernelError
from dtlayout.kernel import find_packages
from dtlayout.layout import Layout
from dtlayout.pipelining.schedule import make_schedule
from dtlayout.signals import StopRequest
from dtlayout.training import run
from dtlayout.training.kernels import find_other_attention, first_forward
from dtlayout.training.run import check_steps_left


def test_another_attention_kernel_than_was_asked_for_is_found():
    assert find_other_attention("sdpa-flash", {"flash"}) == find_other_attention("flash-attn", {"flash-attn"}) == ""
    assert find_other_attention("sdpa-flash", set()) == ""  # nothing was recorded
    assert "attention='sdpa-flash', but math ran" in find_other_attention("sdpa-flash", {"math"})
    assert "but flash, math ran" in find_other_attention("sdpa-math", {"math", "flash"})
    assert "attention='fa3', but flash ran" in find_other_attention("fa3", {"flash"})


def test_one_forward_of_a_step_is_recorded_whatever_else_watches_it():
    seen, recorded = [], []
    orders = make_schedule(Layout(pp=2), Batch(global_batch=4, seq_len=8)).ranks
    for actions in orders:
        runtime = SimpleNamespace(actions=actions, before_action=seen.append)
        watch, recorder = runtime.before_action, ExitStack()
        recorder.callback(lambda: recorded.append(seen[-1]))  # what comes when it ends
        with first_forward(runtime, recorder):
            for action in (*actions, None):
                runtime.before_action(action)
        assert runtime.before_action is watch
    assert seen == [*orders[0], None, *orders[1], None]
    assert recorded == [orders[0][1], orders[1][2]]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("attention", "flash-attn", "no package flash_attn here; install it: pip install 'dtlayout\\[flash-attn\\]'"),
        ("swiglu", "liger", "no package liger_kernel here; install it: pip install 'dtlayout\\[liger\\]'"),
        ("attention", "fa3", "this GPU has 8.0; use kernels.attention=sdpa-flash"),
    ],
)
def test_a_kernel_that_is_not_here_is_refused_before_ranks_join(monkeypatch, name, value, reason):
    config = parse_config(
        {
            "model": {"name": "debug"}, "batch": {"global_batch": 8, "seq_len": 8}, "kernels": {name: value},
            "train": {"steps": 1},
        }
    )  # fmt: skip
    monkeypatch.setattr(run, "open_device", lambda *_: Device("cuda", "a GPU", None, (8, 0), packages=find_packages()))
    monkeypatch.setattr(run, "join_ranks", lambda *_: pytest.fail("ranks joined"))
    monkeypatch.setattr("dtlayout.kernel.find_spec", lambda module: None)
    with pytest.raises(InvalidConfig, match=reason) as caught:
        run.train(config, Layout(), StopRequest())
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("deterministic", [True, False])
def test_determinism_is_asked_for_before_the_device_is_opened_and_cudnn_refused(monkeypatch, deterministic):
    train = {"steps": 1, "deterministic": deterministic}
    config = parse_config(
        {
            "model": {"name": "debug"}, "batch": {"global_batch": 8, "seq_len": 8}, "train": train,
            "precision": {"compute": "bfloat16"}, "kernels": {"attention": "sdpa-cudnn"},
        }
    )  # fmt: skip
    done: list[str] = []

    def open_device(*_):
        done.append("device")
        return Device("cuda", "a GPU", None, (9, 0), packages=find_packages())

    def stop(*_):
        raise KernelError("so far")

    monkeypatch.setattr(run, "repeat_bits", done.append)
    monkeypatch.setattr(run, "open_device", open_device)
    monkeypatch.setattr(run, "open_store", stop)
    with pytest.raises(
        InvalidConfig if deterministic else KernelError, match="other bits" if deterministic else "so far"
    ):
        run.train(config, Layout(), StopRequest())
    assert done == (["auto", "device"] if deterministic else ["device"])


def test_a_checkpoint_beyond_the_last_step_is_refused():
    check_steps_left(Path("step-8"), 8, 8)
    with pytest.raises(CheckpointError, match=r"step-8 has done 8 steps, more than train.steps=7; raise train.steps"):
        check_steps_left(Path("step-8"), 8, 7)
