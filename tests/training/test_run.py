"""What a run refuses after it has been built."""

import gc
import math
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from dtlayout.base.errors import EXIT_STOPPED, CheckpointError, InvalidConfig, InvalidLayout, KernelError
from dtlayout.base.lease import LEASE_NAME
from dtlayout.base.signals import StopRequest
from dtlayout.config.loading import parse_config
from dtlayout.config.sections import SpikesConfig
from dtlayout.data.samples import Seen
from dtlayout.pipelining.schedule import make_schedule
from dtlayout.spec.batch import Batch
from dtlayout.spec.device import Device
from dtlayout.spec.kernel_table import find_packages
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.training import run, start
from dtlayout.training.checkpoints import Checkpoints, check_steps_left
from dtlayout.training.kernels import find_other_attention, first_forward
from dtlayout.training.metrics import Summary, read_summary, write_summary
from dtlayout.training.observer import Observer
from dtlayout.training.observers import order
from dtlayout.training.observers.folder import FolderObserver
from dtlayout.training.observers.garbage import GarbageObserver
from dtlayout.training.observers.validation import ValidationObserver
from dtlayout.training.result import StepResult
from dtlayout.training.spikes import SpikeDetector
from dtlayout.training.trainer import Trainer
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
    monkeypatch.setattr(
        start, "open_device", lambda *_: Device("cuda", "a GPU", None, (8, 0), packages=find_packages())
    )
    monkeypatch.setattr(run, "join_ranks", lambda *_: pytest.fail("ranks joined"))
    monkeypatch.setattr("dtlayout.spec.kernel_table.find_spec", lambda module: None)
    with pytest.raises(InvalidConfig, match=reason) as caught:
        run.train(config, Layout(), StopRequest())
    assert len(caught.value.problems) == 1


def test_bf16_is_refused_before_ranks_join_on_a_gpu_that_has_none(monkeypatch):
    tables = {"model": {"name": "debug"}, "batch": {"global_batch": 8, "seq_len": 8}, "train": {"steps": 1}}
    monkeypatch.setattr(start, "open_device", lambda *_: Device("cuda", "an old GPU", None, (7, 5)))
    monkeypatch.setattr(run, "join_ranks", lambda *_: pytest.fail("ranks joined"))
    refused = r"bfloat16 is nothing that an old GPU, of compute capability 7\.5, .* use precision.compute=float16"
    with pytest.raises(InvalidLayout, match=refused):
        run.train(parse_config(tables), Layout(), StopRequest())


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

    monkeypatch.setattr(start, "repeat_bits", done.append)
    monkeypatch.setattr(start, "open_device", open_device)
    monkeypatch.setattr(start, "open_store", stop)
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


class FakeTrainer(Trainer):
    """A trainer of steps that have these results, and whose parts take seconds of their own."""

    def __init__(self, clock: Clock, results: list[StepResult], config: SimpleNamespace, spikes: SpikesConfig):
        self.clock, self.results, self.config, self.layout = clock, results, config, Layout()
        self.spikes, self.learning_rate = SpikeDetector(spikes), SimpleNamespace(at=lambda index: 0.1)
        self.assembly = SimpleNamespace(runtime=None, modules=[])
        self.loss_scale = None
        samples = SimpleNamespace(size_of=lambda step: config.batch.global_batch)
        self.batches, self.optimizer, self.watch = SimpleNamespace(samples=samples), None, mock.Mock(spec=Watchdog)

    def fetch_ahead(self, steps):
        for step in steps:
            self.clock.work(f"fetch {step}", FETCH_S)
            yield SimpleNamespace(step=step, wait_s=FETCH_S)

    def launch(self, number, batch):
        self.clock.work(f"launch {batch.step}", LAUNCH_S)
        assert number == batch.step
        return self

    def wait(self):
        self.clock.work("wait", WAIT_S)
        return self.results[self.clock.done.count("wait") - 1]

    def find_batch(self, number):
        return Batch(global_batch=2, seq_len=8)

    def follow(self, batch):
        assert batch is not None, "one that was fetched"

    def count_seen(self, done):
        return Seen(done, done, 16 * done)

    def wait_for_update(self):
        self.clock.work("update", UPDATE_S)

    def resolve(self):
        return self.config


class FakeRecords(Observer):
    """Notes each finite step for as many seconds."""

    is_writer, folder, display = True, Path(), SimpleNamespace(say=lambda text: None)

    def __init__(self, clock: Clock):
        self.clock, self.times_s = clock, list[float]()
        self.skipped, self.spikes, self.peaks, self.num_slow = list[int](), list[int](), None, 2

    def note_samples(self, *_):
        return ""

    def after_step(self, step):
        if step.result.is_finite:
            assert step.data_wait_s == FETCH_S and step.tokens == 16 * step.number
            self.clock.work(f"note {step.number}", NOTE_S)
            self.times_s.append(step.time_s)
            self.clock.measured += [step.number] * (step.peak_bytes is not None)


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
    collect_every: int = 0,
) -> tuple[Clock, tuple[int, int], list[float]]:
    """The loop of a run of three steps with its observers, all of whose parts take seconds of their own."""
    clock = Clock()
    config = SimpleNamespace(
        validation=SimpleNamespace(every=validated, at_start=False), count_held_out_batches=lambda _: 1,
        train=SimpleNamespace(steps=3, on_nonfinite="skip" if skips else "stop", collect_every=collect_every),
        metrics=SimpleNamespace(memory_every=9, memory=False, timeline=False),
        checkpoint=SimpleNamespace(every=every, save=bool(every)), optimizer=None, model=None,
        batch=Batch(global_batch=2, seq_len=8),
    )  # fmt: skip
    trainer, records = FakeTrainer(clock, results, config, spikes), FakeRecords(clock)
    checkpoints = mock.Mock(spec=Checkpoints, host=None, saved=0)

    def save(trainer, checkpoints, done, folder, *, is_last):
        clock.work(f"save {done}" if folder == "checkpoints" else f"keep {done}", SAVE_S)
        checkpoints.saved = done if folder == "checkpoints" else checkpoints.saved

    def validate(observer):
        clock.work("validate", VALIDATE_S)
        return None if stops_in_validation else {"": 1.0}

    monkeypatch.setattr(ValidationObserver, "_measure", validate)
    monkeypatch.setattr("dtlayout.training.observers.saves.save", save)
    monkeypatch.setattr("dtlayout.training.observers.spikes.save", save)
    monkeypatch.setattr("dtlayout.training.observers.nonfinite.fill_state", lambda *_: None)
    monkeypatch.setattr("dtlayout.training.observers.loss_scale.fill_state", lambda *_: None)
    monkeypatch.setattr(order, "KernelObserver", lambda *_: Observer())
    monkeypatch.setattr(order, "replace", lambda batches, **_: batches)
    meter = SimpleNamespace(
        watch=nullcontext, gather_peaks=lambda layout: [1], peaks_by_pp_rank=[1], reserved_bytes=None
    )
    monkeypatch.setattr(order, "MemoryMeter", lambda *_, **__: meter)
    kernels = Kernels(compile="none" if has_peaks else "blocks")
    inputs = SimpleNamespace(
        config=config, layout=Layout(), device=Device("cpu"), chosen=SimpleNamespace(kernels=kernels),
        held_out={"": SimpleNamespace(num_batches=1)} if validated else {},
    )  # fmt: skip
    steps = range(1, 4)
    observers = order.make_observers(inputs, trainer, checkpoints, records, FolderObserver(None), steps)
    monkeypatch.setattr(run.time, "perf_counter", lambda: clock.now_s)
    exit_code, done = run.run_steps(steps, trainer, observers, trainer.watch)
    return clock, (exit_code, checkpoints.saved if exit_code == EXIT_STOPPED else done), records.times_s


FINE = StepResult(loss=1.0, grad_norm=1.0, stop_requested=False)


def test_the_next_batch_is_asked_for_while_the_device_works_and_each_second_counts_once(monkeypatch):
    clock, ended, times_s = play(monkeypatch, [FINE] * 3)
    assert clock.done == [
        "fetch 1", "launch 1", "fetch 2", "wait", "note 1", "launch 2", "fetch 3", "wait", "note 2",
        "launch 3", "wait", "update", "note 3",
    ]  # fmt: skip
    assert ended == (0, 3)
    step_s = FETCH_S + LAUNCH_S + WAIT_S
    assert times_s == [FETCH_S + step_s, step_s + NOTE_S, step_s - FETCH_S + NOTE_S + UPDATE_S]
    assert sum(times_s) == clock.now_s - NOTE_S  # the last one's, after all steps


def test_garbage_is_collected_after_every_so_many_steps(monkeypatch):
    collected: list[int] = []
    monkeypatch.setattr("dtlayout.training.observers.garbage.gc.collect", collected.append)
    play(monkeypatch, [FINE] * 3, collect_every=2)
    assert collected == [1]


def test_between_steps_python_collects_nothing_by_itself():
    observer = GarbageObserver(50)
    try:
        observer.at_start()
        assert not gc.isenabled()
    finally:
        gc.enable()
    GarbageObserver(0).at_start()
    assert gc.isenabled()


def test_no_step_is_measured_where_that_would_change_its_bits(monkeypatch):
    assert play(monkeypatch, [FINE] * 3)[0].measured == [2, 3]
    assert play(monkeypatch, [FINE] * 3, has_peaks=False)[0].measured == []


def test_a_checkpoint_waits_for_the_update_and_counts_for_no_step(monkeypatch):
    clock, ended, times_s = play(monkeypatch, [FINE] * 3, every=2)
    assert clock.done[7:12] == ["wait", "update", "note 2", "save 2", "launch 3"]
    assert ended == (0, 3)
    step_s = FETCH_S + LAUNCH_S + WAIT_S
    assert times_s == [FETCH_S + step_s, step_s + NOTE_S + UPDATE_S, step_s - FETCH_S + UPDATE_S]


def test_validation_waits_for_the_update_and_counts_for_no_step(monkeypatch):
    clock, ended, times_s = play(monkeypatch, [FINE] * 3, validated=2)
    assert clock.done[7:12] == ["wait", "update", "validate", "note 2", "launch 3"]
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


@pytest.mark.parametrize(
    ("change", "ended"), [({}, (0, 3)), ({"loss_scale": 1.0}, (4, 1)), ({"loss": math.nan}, (4, 1))]
)
def test_gradients_that_overflow_end_no_run_as_long_as_their_scale_can_fall(monkeypatch, change, ended):
    bad = replace(FINE, **{"grad_norm": math.inf, "loss_scale": 8.0, **change})
    clock, found, _ = play(monkeypatch, [FINE, bad, FINE], every=2)
    assert found == ended and "note 2" not in clock.done
    assert [what for what in clock.done if what.startswith("save")] == ["save 3"] * (ended[0] == 0)


def test_the_state_that_met_a_spike_is_kept_once_and_counts_for_no_step(monkeypatch):
    results = [FINE, replace(FINE, loss=9.0), replace(FINE, loss=9.0)]
    spikes = SpikesConfig(action="save", min_steps=1)
    clock, ended, times_s = play(monkeypatch, results, every=1, spikes=spikes)
    assert ended == (0, 3)
    assert clock.done[clock.done.index("note 1") :] == [
        "note 1", "save 1", "launch 2", "fetch 3", "wait", "update", "note 2", "keep 1", "save 2", "launch 3", "wait",
        "update", "note 3", "save 3",
    ]  # fmt: skip
    assert times_s[2] == LAUNCH_S + WAIT_S + UPDATE_S


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_made", [False, True])
def test_a_signal_of_the_start_is_heard_of_before_the_first_step(is_made):
    stop = StopRequest()
    stop.is_made = is_made
    assert run._is_stopped(stop, None) is is_made
