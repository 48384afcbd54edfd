"""What a run refuses after it has been built."""

import math
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from dtlayout.base.errors import CheckpointError, InvalidConfig, KernelError
from dtlayout.base.lease import LEASE_NAME
from dtlayout.base.signals import StopRequest
from dtlayout.config.config import SpikesConfig, parse_config
from dtlayout.data.samples import Seen
from dtlayout.pipelining.schedule import make_schedule
from dtlayout.spec.batch import Batch
from dtlayout.spec.device import Device
from dtlayout.spec.kernel_table import find_packages
from dtlayout.spec.layout import Layout
from dtlayout.training import run
from dtlayout.training.checkpoints import Checkpoints, check_steps_left
from dtlayout.training.kernels import find_other_attention, first_forward
from dtlayout.training.metrics import Summary, read_summary, write_summary
from dtlayout.training.spikes import SpikeDetector
from dtlayout.training.step import StepResult
from dtlayout.training.watchdog import Watchdog


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
    monkeypatch.setattr("dtlayout.spec.kernel_table.find_spec", lambda module: None)
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


@pytest.mark.parametrize(
    ("owner", "outcome"), [("mine", "crashed"), ("", "crashed"), ("theirs", "running"), (None, "crashed")]
)
def test_a_crash_is_noted_in_a_folder_that_is_not_another_runs_by_now(tmp_path, owner, outcome):
    write_summary(Summary(outcome="running").to_dict(), tmp_path)
    if owner is not None:
        (tmp_path / LEASE_NAME).write_text(owner)
    run._note_crash(tmp_path, "mine", "rank 3 is gone", False)
    assert read_summary(tmp_path)["outcome"] == outcome
    run._note_crash(tmp_path, "", "rank 3 is gone", False)  # a run without a lease
    assert read_summary(tmp_path)["outcome"] == "crashed"


def test_a_checkpoint_beyond_the_last_step_is_refused():
    check_steps_left(Path("step-8"), 8, 8)
    with pytest.raises(CheckpointError, match=r"step-8 has done 8 steps, more than train.steps=7; raise train.steps"):
        check_steps_left(Path("step-8"), 8, 7)


class Clock:
    """A clock that moves when somebody works."""

    def __init__(self) -> None:
        self.now_s, self.done = 0.0, list[str]()
        self.measured: list[int] = []
        """Steps of which the peak of memory is noted."""

    def work(self, what: str, seconds: float) -> None:
        self.done.append(what)
        self.now_s += seconds


USUAL = SpikesConfig()
FETCH_S, LAUNCH_S, WAIT_S, UPDATE_S, NOTE_S, SAVE_S, VALIDATE_S = 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0


def play(
    monkeypatch,
    results: list[StepResult],
    *,
    every: int = 0,
    validated: int = 0,
    skips: bool = False,
    spikes: SpikesConfig = USUAL,
    stops_in_validation: bool = False,
    has_peaks: bool = True,
) -> tuple[Clock, tuple[int, int], list[float]]:
    """The loop of a run of three steps, all of whose parts take seconds of their own."""
    clock, times_s = Clock(), list[float]()

    class Launched:
        def wait(self):
            clock.work("wait", WAIT_S)
            return results[clock.done.count("wait") - 1]

    def launch(index, batch, *, is_first):
        clock.work(f"launch {batch}", LAUNCH_S)
        return Launched(), 0.1

    class Fetched(int):
        wait_s = FETCH_S

    def fetch_ahead(steps):
        for step in steps:
            clock.work(f"fetch {step}", FETCH_S)
            yield Fetched(step)

    def note(done, result, lr, step_time_s, *, data_wait_s, peak_bytes, validation_loss, tokens, is_spike):
        assert data_wait_s == FETCH_S and tokens == 16 * done
        clock.work(f"note {done}", NOTE_S)
        times_s.append(step_time_s)
        clock.measured += [done] * (peak_bytes is not None)

    def save(done, folder, *, is_last):
        clock.work(f"save {done}" if folder == "checkpoints" else f"keep {done}", SAVE_S)

    def validate():
        clock.work("validate", VALIDATE_S)
        return None if stops_in_validation else 1.0

    config = SimpleNamespace(
        validation=SimpleNamespace(every=validated),
        train=SimpleNamespace(steps=3),
        metrics=SimpleNamespace(memory_every=9),
        checkpoint=SimpleNamespace(every=every, save=bool(every)),
    )
    loop = SimpleNamespace(
        config=config, _find_seen=lambda done: Seen(done, done, 16 * done),
        held_out=object() if validated else None, _validate=validate, num_drawn=0, timeline=None,
        has_peaks=has_peaks, memory=SimpleNamespace(watch=nullcontext, gather_peaks=lambda layout: [1]), layout=None,
        watch=mock.Mock(spec=Watchdog), _launch=launch, records=SimpleNamespace(note=note),
        batches=SimpleNamespace(fetch_ahead=fetch_ahead), _skip=lambda step, result: skips,
        display=SimpleNamespace(say=lambda text: None), _check_attention=lambda: None,
        spikes=SpikeDetector(spikes), _say_spike=lambda step, result: None,
        _wait_for_update=lambda: clock.work("update", UPDATE_S), _save=save, checkpoints=mock.Mock(spec=Checkpoints),
        _look=lambda: None,
    )  # fmt: skip
    monkeypatch.setattr(run.time, "perf_counter", lambda: clock.now_s)
    return clock, run._Run._loop(loop, 0), times_s


FINE = StepResult(loss=1.0, grad_norm=1.0, stop_requested=False)


def test_the_next_batch_is_asked_for_while_the_device_works_and_each_second_counts_once(monkeypatch):
    clock, ended, times_s = play(monkeypatch, [FINE] * 3)
    assert clock.done == [
        "fetch 0", "launch 0", "fetch 1", "wait", "note 1", "launch 1", "fetch 2", "wait", "note 2",
        "launch 2", "wait", "update", "note 3",
    ]  # fmt: skip
    assert ended == (0, 3)
    step_s = FETCH_S + LAUNCH_S + WAIT_S
    assert times_s == [FETCH_S + step_s, step_s + NOTE_S, step_s - FETCH_S + NOTE_S + UPDATE_S]
    assert sum(times_s) == clock.now_s - NOTE_S  # the last one's, after all steps


def test_no_step_is_measured_where_that_would_change_its_bits(monkeypatch):
    assert play(monkeypatch, [FINE] * 3)[0].measured == [2, 3]
    assert play(monkeypatch, [FINE] * 3, has_peaks=False)[0].measured == []


def test_a_checkpoint_waits_for_the_update_and_counts_for_no_step(monkeypatch):
    clock, ended, times_s = play(monkeypatch, [FINE] * 3, every=2)
    assert clock.done[7:12] == ["wait", "update", "note 2", "save 2", "launch 2"]
    assert ended == (0, 3)
    step_s = FETCH_S + LAUNCH_S + WAIT_S
    assert times_s == [FETCH_S + step_s, step_s + NOTE_S + UPDATE_S, step_s - FETCH_S + UPDATE_S]


def test_validation_waits_for_the_update_and_counts_for_no_step(monkeypatch):
    clock, ended, times_s = play(monkeypatch, [FINE] * 3, validated=2)
    assert clock.done[7:12] == ["wait", "update", "validate", "note 2", "launch 2"]
    assert clock.done[-4:] == ["wait", "update", "validate", "note 3"]
    assert ended == (0, 3)
    step_s = FETCH_S + LAUNCH_S + WAIT_S
    assert times_s == [FETCH_S + step_s, step_s + NOTE_S + UPDATE_S, step_s - FETCH_S + UPDATE_S]


def test_a_signal_during_validation_ends_that_and_the_state_is_saved_at_once(monkeypatch):
    clock, ended, _ = play(monkeypatch, [FINE] * 3, every=9, validated=2, stops_in_validation=True)
    assert clock.done[7:] == ["wait", "update", "validate", "note 2", "save 2"]
    assert ended == (3, 2)


def test_a_step_that_is_the_last_because_of_a_signal_is_not_validated(monkeypatch):
    clock, ended, _ = play(monkeypatch, [FINE, replace(FINE, stop_requested=True)], every=9, validated=1)
    assert clock.done[-4:] == ["wait", "update", "note 2", "save 2"]
    assert ended == (3, 2)


@pytest.mark.parametrize(
    ("last", "end", "ended"),
    [
        (replace(FINE, stop_requested=True), ["wait", "update", "note 2", "save 2"], (3, 2)),
        (replace(FINE, loss=math.nan), ["wait", "update"], (4, 1)),
        (replace(FINE, grad_norm=math.inf, stop_requested=True), ["wait", "update"], (4, 1)),
    ],
)
def test_a_stop_saves_and_numbers_that_are_not_finite_end_the_run_without(monkeypatch, last, end, ended):
    clock, found, _ = play(monkeypatch, [FINE, last], every=9)
    assert clock.done[7:] == end
    assert found == ended


@pytest.mark.parametrize(
    ("bad", "every", "saved"),
    [
        (0, 1, ["save 2", "save 3"]), (1, 1, ["save 1", "save 3"]), (2, 1, ["save 1", "save 2", "save 3"]),
        (1, 2, ["save 3"]), (0, 2, ["save 2", "save 3"]),
    ],
)  # fmt: skip
def test_a_step_that_is_skipped_is_not_noted_and_a_checkpoint_within_the_run_waits_for_one_that_is_finite(
    monkeypatch, bad, every, saved
):
    results = [FINE] * 3
    results[bad] = replace(FINE, loss=math.nan)
    clock, ended, _ = play(monkeypatch, results, every=every, skips=True)
    assert ended == (0, 3)
    assert [f"note {step + 1}" in clock.done for step in range(3)] == [step != bad for step in range(3)]
    assert [what for what in clock.done if what.startswith("save")] == saved


def test_the_state_that_met_a_spike_is_kept_once_and_counts_for_no_step(monkeypatch):
    results = [FINE, replace(FINE, loss=9.0), replace(FINE, loss=9.0)]
    spikes = SpikesConfig(action="save", min_steps=1)
    clock, ended, times_s = play(monkeypatch, results, every=1, spikes=spikes)
    assert ended == (0, 3)
    assert clock.done[clock.done.index("note 1") :] == [
        "note 1", "save 1", "launch 1", "fetch 2", "wait", "update", "note 2", "keep 1", "save 2", "launch 2", "wait",
        "update", "note 3", "save 3",
    ]  # fmt: skip
    assert times_s[2] == LAUNCH_S + WAIT_S + UPDATE_S


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_made", [False, True])
def test_a_signal_of_the_start_is_heard_of_before_the_first_step(is_made):
    stop = StopRequest()
    stop.is_made = is_made
    assert run._Run._is_stopped(SimpleNamespace(stop=stop, host=None)) is is_made
