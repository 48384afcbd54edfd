"""A training run from a checked config to its exit code: build, resume, step, save, report."""

import os
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from dtlayout.base.errors import EXIT_DONE, EXIT_NON_FINITE, EXIT_STOPPED, DtlayoutError, InvalidConfig, KernelError
from dtlayout.base.files import expand
from dtlayout.base.lease import TRUSTED_S, Lease, is_of_another
from dtlayout.base.signals import StopRequest
from dtlayout.checkpoint.hf import load_weights
from dtlayout.checkpoint.kept import keep
from dtlayout.checkpoint.manifest import CHECKPOINTS
from dtlayout.checkpoint.optimizer_state import fill_state, set_updates
from dtlayout.checkpoint.sharded import find_changes
from dtlayout.config.config import Config, DataConfig
from dtlayout.data.extent import describe_held_out, describe_training
from dtlayout.data.nodes import prepare_on_node
from dtlayout.data.samples import Samples, Seen, check_held_out, open_samples, own_indices
from dtlayout.measure.kernels import KernelRecorder
from dtlayout.mesh.axes import dp_rank
from dtlayout.ops.attention import attention_implementation
from dtlayout.planner.prediction import refuse_beyond_host, refuse_hopeless
from dtlayout.plans.init import initialize
from dtlayout.schedules.actions import Action
from dtlayout.spec.device import Device, find_host_bytes
from dtlayout.spec.kernels import OpenKernels, ResolvedKernels
from dtlayout.spec.layout import Layout, OpenLayout
from dtlayout.training.batches import Batches, OwnBatch
from dtlayout.training.build import assemble
from dtlayout.training.checkpoints import SPIKES, Checkpoints
from dtlayout.training.devices import open_device, repeat_bits
from dtlayout.training.kernels import find_other_attention, first_forward
from dtlayout.training.memory import MemoryMeter
from dtlayout.training.metrics import note_crash
from dtlayout.training.optimizer import LearningRate, build_optimizer, set_learning_rate
from dtlayout.training.position import find_seen, note_seen
from dtlayout.training.records import Records
from dtlayout.training.rendezvous import join_ranks, meet, open_store
from dtlayout.training.spikes import SpikeDetector
from dtlayout.training.step import Launched, StepResult, TrainStep
from dtlayout.training.timeline import TimelineRecorder
from dtlayout.training.watchdog import SPARE_S, Watchdog

STEPS_DRAWN = 4
"""How many steps of a run memory.json shows."""
MAX_SKIPPED = 10
"""Steps in a row that are left out as not finite: after so many it is not the data, and the run ends."""


def train(config: Config, layout: Layout, stop: StopRequest, lease: Lease | None = None) -> int:
    """Train until `train.steps`, a signal or a non-finite loss; the exit code of this rank.

    `lease` is that of the run folder, on the rank that writes there.
    """
    if config.train.deterministic:
        repeat_bits(config.train.device)
    device = open_device(config.train.device, config.cluster.known_gpu)
    chosen = config.choose_kernels(device, layout)
    kernels = chosen.kernels
    if config.train.deterministic and (problems := kernels.unrepeatable(device)):
        raise InvalidConfig(problems)
    kernels.check(config.precision, device, document_mask=config.data.document_mask, **layout.asked_of_kernels)
    known = replace(config, kernels=OpenKernels.of(kernels))
    refuse_hopeless(known, layout, device.gpu)
    if device.type == "cpu":
        refuse_beyond_host(known, layout, device.gpu, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), find_host_bytes())
    store = open_store(config.train.timeout_s)
    samples = _open_samples(config, config.data, store, "tokens", seed=config.train.seed)
    held_out = _open_held_out(config, store)
    folder = Path(config.train.run_folder)
    if os.environ["RANK"] == "0":
        store.set("lease", lease.text if lease else "")
    meet(store, stop, config.train.timeout_s)
    note = partial(_note_crash, folder, store.get("lease").decode())
    patience_s = max(config.train.timeout_s, config.checkpoint.timeout_s)
    watch = Watchdog(store, config.train.timeout_s, patience_s, note=note, flight=folder / "flight")
    if lease:
        lease.before_end = watch.note_refusal
    with watch, attention_implementation(kernels.attention):
        watch.at("joining the other ranks", waits=True)
        join_ranks(device, config.train.timeout_s + SPARE_S, store)
        run = _Run(config, layout, chosen, device, samples, held_out, stop, watch, lease)
        try:
            exit_code = run.execute()
        except DtlayoutError as error:
            if os.environ.get("LOCAL_RANK", "0") != "0":  # it may be this rank's alone; local rank 0's are printed
                print(f"rank {dist.get_rank()}: {error}", file=sys.stderr, flush=True)
            raise
        dist.destroy_process_group()  # not after a failure: NCCL would wait for ranks that do not come
    if exit_code == EXIT_DONE and config.checkpoint.export and run.is_writer:
        run.checkpoints.export()
    return exit_code


class _Run:
    """One rank's side of a run."""

    def __init__(
        self, config: Config, layout: Layout, chosen: ResolvedKernels, device: Device, samples: Samples,
        held_out: Samples | None, stop: StopRequest, watch: Watchdog, lease: Lease | None,
    ):  # fmt: skip
        """`chosen` are the config's kernels without an auto, `held_out` the samples of [validation]."""
        self.lease = lease
        kernels = chosen.kernels
        self.config = config
        self.layout = layout
        self.chosen = chosen
        self.device = device
        self.records = Records(config, layout, chosen, device)
        self.is_writer = self.records.is_writer
        self.watch = watch
        self.stop = stop
        indices = own_indices(config.batch.global_batch, dp_rank(dist.get_rank(), layout), layout.dp)
        self.batches = Batches(
            samples, indices, device.type, has_documents=config.data.document_mask, layout=layout, rank=dist.get_rank()
        )
        self.held_out = replace(self.batches, samples=held_out) if held_out else None
        # What decides the order of samples.
        self.origin = {"seq_len": config.batch.seq_len, "seed": config.train.seed, "tokens": samples.fingerprint}
        model = config.model
        values = model, config.batch, layout, kernels, config.precision
        self.display = self.records.display
        self.checkpoints = Checkpoints(config, self.display.say, watch, lease.check if lease else lambda: None)
        self.host = self.checkpoints.host
        watch.at("building the model", is_long=True)
        is_loaded = config.train.init_from and self.checkpoints.newest is None
        self.assembly = assemble(
            *values, seed=config.train.seed, device_type=device.type, timeout_s=config.train.timeout_s + SPARE_S,
            give_weights=(
                partial(load_weights, expand(config.train.init_from), group=self.host) if is_loaded else initialize
            ),
        )  # fmt: skip
        self.optimizer = build_optimizer(self.assembly.modules, model, config.optimizer)
        state_device = "cpu" if layout.offloads_state else device.type
        self.checkpoints.serve(self.assembly.modules, self.optimizer, state_device)
        self.learning_rate = LearningRate.of(config.optimizer, config.train.steps, {})
        mesh, max_norm, aliases = self.assembly.mesh, config.optimizer.max_norm, model.aliases
        self.assembly.runtime.before_action = self._before_action
        self.timeline: TimelineRecorder | None = None
        if config.metrics.timeline:
            self.timeline = TimelineRecorder(device.type, layout, config.train.timeout_s + SPARE_S)
            self.assembly.runtime.after_input = self.timeline.after_input
            for sync in self.assembly.sync:
                sync.observe(self.timeline.transfer)
        self.step = TrainStep(self.assembly.runtime, self.optimizer, max_norm=max_norm, mesh=mesh, aliases=aliases)
        self.memory = MemoryMeter(
            device.type, self.assembly.modules, self.optimizer, state_on_host=layout.offloads_state
        )
        # On a CPU a step whose storages are tracked runs uncompiled, with other bits and another peak.
        self.has_peaks = device.type == "cuda" or kernels.compile == "none"
        self.recorder = KernelRecorder()
        self.skipped: list[int] = []
        self.spikes = SpikeDetector(config.spikes)
        self.num_drawn = 0  # steps of which memory.json shows the curve
        self.is_drawn = False  # whether this one is one of them

    def execute(self) -> int:
        first_step = self._resume()
        is_loaded = bool(self.config.train.init_from) and self.checkpoints.newest is None
        microbatches = self.assembly.schedule.num_microbatches
        self.records.say_what_starts(first_step, self.assembly.slices, microbatches, is_loaded=is_loaded)
        if self.is_writer:
            self._say_what_is_read()
        self._look()
        self.records.open(self._resolve(), first_step)
        if self.is_writer:
            keep(self.config, is_new=self.checkpoints.newest is None)
        if self.config.metrics.memory and first_step == 0:
            self.num_drawn = STEPS_DRAWN
        exit_code = None
        try:
            with self.display:
                exit_code, done = (EXIT_STOPPED, first_step) if self._is_stopped() else self._loop(first_step)
                self.checkpoints.finish()
                if exit_code == EXIT_NON_FINITE and self.is_writer:
                    self.checkpoints.go_back(done, {*self.skipped, *self.spikes.found})
        finally:
            self.records.close(is_fine=exit_code in (EXIT_DONE, EXIT_STOPPED))
        self._look()
        self.records.report(
            exit_code, done, self.memory.peaks_by_pp_rank, skipped=self.skipped, spikes=self.spikes.found,
            executed=self.recorder.executed, num_slow=max(2, self.num_drawn),
        )  # fmt: skip
        # A process that does not end with 0 has torchrun, and srun on other nodes, end those that are still writing.
        self.watch.at("waiting for the others to end", is_long=True, waits=True)
        dist.barrier(group=self.host)
        return exit_code

    def _say_what_is_read(self) -> None:
        lines = describe_training(self.batches.samples, self.config.train.steps)
        if self.held_out is not None:
            lines += describe_held_out(self.held_out.samples, self.config.validation.batches)
        for line in lines:
            self.display.say(line)

    def _look(self) -> None:
        """Return if what is written next goes into a folder that is still this run's."""
        if self.lease:
            with suppress(OSError):  # a filesystem that is away for a while ends no run
                self.lease.check(TRUSTED_S)

    def _before_action(self, action: Action | None) -> None:
        self.watch.at_action(action)
        if self.is_drawn:
            self.memory.mark(action)
        if self.timeline is not None:
            self.timeline.before_action(action)

    def _resolve(self) -> Config:
        """A config that reproduces the run."""
        steps, length = self.config.train.steps, self.learning_rate.decay_steps
        optimizer = replace(self.config.optimizer, decay_steps=0 if length == steps else length)
        return replace(self.config, layout=OpenLayout(**asdict(self.layout)), optimizer=optimizer)

    def _resume(self) -> int:
        """Go on from the newest checkpoint, if there is one; the steps that are done."""
        if self.checkpoints.newest is None:
            return 0
        done, origin = self.checkpoints.load()
        self.spikes.restore(origin.get("spikes", {}))
        set_updates(self.optimizer, done - self.spikes.num_left_out)
        saved, num_steps = origin.get("learning_rate", {}), self.config.train.steps
        self.learning_rate = LearningRate.of(self.config.optimizer, num_steps, saved)
        for line in self.learning_rate.describe_resume(saved, done, num_steps):
            self.display.say(f"note: {line}")
        seen, lines = find_seen(origin, done, self.config.batch, self.checkpoints.newest)
        self.batches = replace(self.batches, samples=replace(self.batches.samples, seen=seen))
        for line in lines:
            self.display.say(f"note: {line}")
        for name, (old, new) in find_changes(origin, self.origin).items():
            self.display.say(f"note: {name} was {old} when this was saved and is {new}: samples come in another order")
        return done

    def _find_seen(self, done: int) -> Seen:
        """What so many steps have seen."""
        return self.batches.samples.seen.after(done, self.config.batch)

    def _is_stopped(self) -> bool:
        """Whether a signal has come to any rank before the first step, which may take long to compile."""
        stops = torch.tensor(int(self.stop.is_made))
        dist.all_reduce(stops, group=self.host)
        return bool(stops)

    def _loop(self, first_step: int) -> tuple[int, int]:
        """Step until the end; the exit code and the steps that are done."""
        num_steps = self.config.train.steps
        saved, is_save_due, started = first_step, False, time.perf_counter()
        batches = self.batches.fetch_ahead(range(first_step, num_steps))
        following = next(batches, None)
        for index in range(first_step, num_steps):
            batch = following
            assert batch is not None, "there is one for each step"
            # The first step makes the optimizer's state, so it is not like the others.
            is_due = index % self.config.metrics.memory_every == 0 or index + 1 == num_steps
            is_measured = self.has_peaks and (index == first_step + 1 or (index > first_step and is_due))
            self.is_drawn = index < self.num_drawn
            # Not one whose memory is measured, which slows it.
            every = self.config.metrics.memory_every
            is_recorded = index == first_step + 2 or (index > first_step + 2 and index % every == 2 % every)
            recorder = self.timeline if is_recorded else None
            self.watch.begin_step(index + 1)
            if recorder is not None:
                recorder.begin()
            with self.memory.watch() if is_measured or self.is_drawn else nullcontext():
                launched, lr = self._launch(index, batch, is_first=index == first_step)
            self.watch.at("reading the next batch")
            following = next(batches, None)  # while the device works
            self.watch.at("waiting for its numbers", waits=True)
            result = launched.wait()
            self.watch.at("noting its numbers")
            self._look()
            if index == first_step:
                self._check_attention()
            is_broken = not result.is_finite and not self._skip(index + 1, result)
            is_over = is_broken or result.stop_requested or index + 1 == num_steps
            is_stopped = result.stop_requested
            is_spike, is_kept = self.spikes.is_spike(result), self.spikes.keeps_state(index + 1, result)
            if is_spike:
                self._say_spike(index + 1, result)
            # Not after numbers that are not finite: if the state has led to them, it would push out those before.
            is_save_due = is_save_due or _is_due(self.config.checkpoint.every, index + 1)
            is_saved = self.config.checkpoint.save and (is_over or (is_save_due and result.is_finite))
            is_validated = (
                bool(self.held_out)
                and result.is_finite
                and not is_stopped
                and (is_over or _is_due(self.config.validation.every, index + 1))
            )
            if is_over or is_saved or is_validated or is_kept:
                self._wait_for_update()
            ended = time.perf_counter()
            step_time_s, started = ended - started, ended
            if self.is_drawn and (is_over or index + 1 == self.num_drawn):
                self.records.write_curves(index + 1, self.memory.gather_curves(self.layout, self.host))
            if is_broken:
                return EXIT_NON_FINITE, index
            validated = self._validate() if is_validated else None
            if is_validated and validated is None:
                is_stopped = is_over = True
                is_saved = self.config.checkpoint.save
            if result.is_finite:
                self.records.note(
                    index + 1, result, lr, step_time_s, data_wait_s=batch.wait_s, validation_loss=validated,
                    tokens=self._find_seen(index + 1).tokens,
                    peak_bytes=max(self.memory.gather_peaks(self.layout)) if is_measured else None, is_spike=is_spike,
                )  # fmt: skip
            if recorder is not None:
                self.watch.at("gathering its timeline", waits=True)
                if (timeline := recorder.gather()) is not None:
                    self.records.write_timeline(index + 1, timeline)
            self.checkpoints.finish(waits=False)
            if is_kept:
                self._save(index, SPIKES, is_last=False)
            self.spikes.add(index + 1, result)
            if is_saved:
                self._save(index + 1, CHECKPOINTS, is_last=is_over)
                saved, is_save_due = index + 1, False
            if is_saved or is_validated or is_kept:
                started = time.perf_counter()
            if is_stopped and index + 1 < num_steps:
                return EXIT_STOPPED, saved
        return EXIT_DONE, max(first_step, num_steps)

    def _launch(self, index: int, batch: OwnBatch, *, is_first: bool) -> tuple[Launched, float]:
        """Begin a step; what its numbers will be read from, and its learning rate."""
        lr = self.learning_rate.at(index)
        set_learning_rate(self.optimizer, lr)
        self.watch.at("counting its targets", waits=True)
        is_recorded = is_first and os.environ.get("LOCAL_RANK", "0") == "0"
        launch = partial(self.step.launch, stop=self.stop.is_made, limits=self.spikes.step_limits)
        with first_forward(self.assembly.runtime, self.recorder) if is_recorded else nullcontext():
            return launch(batch.tokens, batch.targets, batch.starts), lr

    def _skip(self, step: int, result: StepResult) -> bool:
        """Note the samples of a step that is not finite; whether the run goes on with the next one."""
        self.skipped.append(step)
        in_a_row = self.skipped[-MAX_SKIPPED:] == list(range(step - MAX_SKIPPED + 1, step + 1))
        goes_on = self.config.train.on_nonfinite == "skip" and not in_a_row
        noted = self.records.note_samples(self.batches.samples, step, result, "nonfinite")
        self.display.say(
            f"step {step}: loss {result.loss}, grad_norm {result.grad_norm}: nothing is updated; "
            f"{noted}; {'skipped' if goes_on else 'stopped'}"
        )
        if in_a_row and self.config.train.on_nonfinite == "skip":
            self.display.say(f"{MAX_SKIPPED} steps in a row were not finite: resume from an older checkpoint")
        if goes_on:
            fill_state(self.optimizer, self.config.optimizer)  # a checkpoint has all of it
        return goes_on

    def _say_spike(self, step: int, result: StepResult) -> None:
        """Say that a step is a spike, and note its samples."""
        limits, is_updated = self.spikes.limits, self.config.spikes.action == "warn"
        noted = self.records.note_samples(self.batches.samples, step, result, "spike")
        self.display.say(
            f"step {step}: a spike: loss {result.loss:.4f} (limit {limits.loss:.4f}), grad_norm {result.grad_norm:.3f} "
            f"(limit {limits.grad_norm:.3f}); {noted}; "
            f"{'updated all the same' if is_updated else 'nothing is updated'}"
        )

    def _wait_for_update(self) -> None:
        """So that it counts as part of its step, where another one does not come next."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _check_attention(self) -> None:
        """KernelError on every rank if one that was recorded ran another kernel than was asked for."""
        attention = self.chosen.kernels.attention
        problem = find_other_attention(attention, set(self.recorder.executed["attention"]))
        problems = torch.tensor(int(bool(problem)))
        dist.all_reduce(problems, group=self.host)
        if problems:
            raise KernelError(problem or f"kernels.attention={attention!r} did not run on another rank")

    def _validate(self) -> float | None:
        """The mean loss of the first batches that are held out, the same ones each time; None if a signal comes."""
        assert self.held_out is not None, "somebody asked whether there are any"
        num_batches = min(self.config.validation.batches, self.held_out.samples.num_batches)
        total, num_targets = 0.0, 0
        for number in range(num_batches):
            self.watch.at(f"validation, batch {number + 1}")
            batch = self.held_out.fetch(number)
            loss, count, is_stopped = self.step.evaluate(
                batch.tokens, batch.targets, batch.starts, stop=self.stop.is_made
            )
            if is_stopped:
                return None
            total, num_targets = total + loss * count, num_targets + count
        return total / max(1, num_targets)

    def _save(self, done: int, folder: str, *, is_last: bool) -> None:
        seen = self._find_seen(done)
        origin = {**self.origin, **asdict(self.config.batch), **note_seen(seen)}
        origin |= {"learning_rate": asdict(self.learning_rate), "spikes": self.spikes.to_dict()}
        self.checkpoints.save(
            done, folder, resolved=self._resolve(), samples=seen.samples, origin=origin, is_last=is_last
        )


def _note_crash(folder: Path, lease_text: str, line: str, is_refusal: bool) -> None:
    """Note why a rank has ended all of them, unless the folder has become another run's; no lease has an empty text."""
    if not lease_text or not is_of_another(folder, lease_text):
        note_crash(folder, line, is_refusal)


def _is_due(every: int, done: int) -> bool:
    return every > 0 and done % every == 0


def _open_samples(config: Config, data: DataConfig, store: dist.Store, what: str, *, seed: int) -> Samples:
    """The samples of a config's data, each source prepared once a node under a name that begins with `what`."""
    folders = [prepare_on_node(each, store, f"{what}/{i}") for i, each in enumerate(data.sources)]
    return open_samples(data, folders, config.model.vocab_size, config.batch, seed=seed)


def _open_held_out(config: Config, store: dist.Store) -> Samples | None:
    """The samples of [validation], whose order no seed decides; DataError if they make no batch."""
    data = config.validation_data
    if data is None:
        return None
    samples = _open_samples(config, data, store, "validation", seed=0)
    check_held_out(samples, data.source)
    return samples
