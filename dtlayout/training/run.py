"""A training run from a checked config to its exit code: the loop first, then what is made ready before it.

Everything else that happens after a step, from validation to checkpoints, is an observer (observer.py); the list of
them, in order, is `make_observers` (observers/order.py).
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from dtlayout.base.errors import EXIT_DONE, EXIT_STOPPED, DtlayoutError
from dtlayout.base.lease import Lease, is_of_another
from dtlayout.base.signals import StopRequest
from dtlayout.checkpoint.first_checkpoint import find_first_checkpoint
from dtlayout.checkpoint.frozen_base import check_base, find_frozen_base
from dtlayout.checkpoint.kept import keep
from dtlayout.config.config import Config
from dtlayout.mesh.opening import open_communicators
from dtlayout.ops.attention import attention_implementation
from dtlayout.schedules.actions import Action
from dtlayout.spec.layout import Layout
from dtlayout.training.checkpoints import Checkpoints
from dtlayout.training.length import decide_steps
from dtlayout.training.metrics import note_crash
from dtlayout.training.observer import Observer
from dtlayout.training.observers.folder import FolderObserver
from dtlayout.training.observers.order import make_observers
from dtlayout.training.records import Records
from dtlayout.training.rendezvous import join_ranks, meet
from dtlayout.training.resume import resume
from dtlayout.training.start import RunInputs, open_inputs
from dtlayout.training.trainer import Trainer, build_trainer
from dtlayout.training.watchdog import SPARE_S, Watchdog


def run_steps(steps: range, trainer: Trainer, observers: Sequence[Observer], watch: Watchdog) -> tuple[int, int]:
    """Train steps by their numbers, from 1; the exit code of the run and the number of steps that are done."""
    started_s = time.perf_counter()
    batches = trainer.fetch_ahead(steps)
    following = next(batches, None)
    for number in steps:
        batch = following
        assert batch is not None, "there is one for each step"
        watch.begin_step(number)
        with ExitStack() as around:
            for observer in observers:
                around.enter_context(observer.around_launch(number))
            launched = trainer.launch(number, batch)
        watch.at("reading the next batch")
        following = next(batches, None)  # while the device works
        watch.at("waiting for its numbers", waits=True)
        step = trainer.describe(number, batch, launched.wait())
        watch.at("noting its numbers")
        for observer in observers:
            observer.on_result(step)
        is_paused = step.is_over or any(observer.pauses(step) for observer in observers)
        if is_paused:
            trainer.wait_for_update()  # so that it counts as part of its own step
        ended_s = time.perf_counter()
        step.time_s, started_s = ended_s - started_s, ended_s
        for observer in observers:
            observer.after_step(step)
        if is_paused:
            started_s = time.perf_counter()  # what observers did counts for no step
        if step.exit_code is not None:
            return step.exit_code, step.num_done
    return EXIT_DONE, steps.stop - 1


def train(config: Config, layout: Layout, stop: StopRequest, lease: Lease | None = None) -> int:
    """Train until `train.steps`, a signal or a non-finite loss; the exit code of this rank.

    `lease` is that of the run folder, on the rank that writes there.
    """
    begun_s = time.monotonic()
    inputs, store = open_inputs(config, layout, stop)
    watch = _open_watchdog(config, store, stop, lease)
    with watch, attention_implementation(inputs.chosen.kernels.attention):
        watch.at("joining the other ranks", waits=True)
        join_ranks(inputs.device, config.train.timeout_s + SPARE_S, store)
        try:
            exit_code, checkpoints = _run(inputs, watch, lease, begun_s)
        except DtlayoutError as error:
            if os.environ.get("LOCAL_RANK", "0") != "0":  # it may be this rank's alone; local rank 0's are printed
                print(f"rank {dist.get_rank()}: {error}", file=sys.stderr, flush=True)
            raise
        dist.destroy_process_group()  # not after a failure: NCCL would wait for ranks that do not come
    if exit_code == EXIT_DONE and config.checkpoint.export and os.environ["RANK"] == "0":
        checkpoints.export()
    return exit_code


def _open_watchdog(config: Config, store: dist.Store, stop: StopRequest, lease: Lease | None) -> Watchdog:
    """The watchdog of this rank, once all ranks have met; Stopped if one of them was asked to stop before."""
    folder = Path(config.train.run_folder)
    if os.environ["RANK"] == "0":
        store.set("lease", lease.text if lease else "")
    meet(store, stop, config.train.timeout_s)
    note = partial(_note_crash, folder, store.get("lease").decode())
    patience_s = max(config.train.timeout_s, config.checkpoint.timeout_s)
    watch = Watchdog(store, config.train.timeout_s, patience_s, note=note, flight=folder / "flight")
    if lease:
        lease.before_end = watch.note_refusal
    return watch


def _note_crash(folder: Path, lease_text: str, line: str, is_refusal: bool) -> None:
    """Note why a rank has ended all of them, unless the folder has become another run's.

    `lease_text` is empty for a run without a lease.
    """
    if not lease_text or not is_of_another(folder, lease_text):
        note_crash(folder, line, is_refusal)


def _run(inputs: RunInputs, watch: Watchdog, lease: Lease | None, begun_s: float) -> tuple[int, Checkpoints]:
    """Build, resume, step and report; the exit code and the checkpoints."""
    config, folder = inputs.config, FolderObserver(lease)
    records = Records(config, inputs.layout, inputs.chosen, inputs.device, begun_s)
    checkpoints = Checkpoints(config, records.display.say, watch, lease.check if lease else lambda: None)
    is_new = checkpoints.newest is None
    config = decide_steps(config, inputs.samples, checkpoints.newest)
    inputs = replace(inputs, config=config)
    records.set_length(config)
    checkpoints.config = config
    base = find_frozen_base(config, checkpoints.host)
    if base is not None and checkpoints.newest is not None:
        check_base(checkpoints.newest, base)
    first = None
    if is_new and config.train.init_from:
        watch.at("looking at the checkpoint of train.init_from", is_long=True)
        first = find_first_checkpoint(config.train.init_from, base, records.display.say, checkpoints.host)
    trainer = build_trainer(inputs, watch, checkpoints.host, is_new=is_new, base=base, first=first)
    watch.at("opening communicators", is_long=True, waits=True)
    open_communicators(trainer.assembly.mesh, trainer.assembly.other_groups)
    state_device = "cpu" if inputs.layout.offloads_state else inputs.device.type
    checkpoints.serve(trainer.assembly.modules, trainer.optimizer, state_device, trainer.assembly.disk)
    done = resume(trainer, checkpoints, records.display.say)
    records.say_what_starts(done, trainer, inputs.held_out, is_new=is_new, first=first)
    folder.look()
    records.open(trainer.resolve(), done)
    if records.is_writer:
        keep(config, is_new=is_new)
    steps = range(done + 1, config.train.steps + 1)
    observers = make_observers(inputs, trainer, checkpoints, records, folder, steps)
    trainer.assembly.runtime.before_action = partial(_before_action, watch, observers)
    exit_code = None
    try:
        with records.display:
            inputs.stop.on_wish = partial(_say_what_is_waited_for, records.display.say, watch)
            is_stopped = _is_stopped(inputs.stop, checkpoints.host)
            for observer in () if is_stopped else observers:
                observer.at_start()
            exit_code, done = (EXIT_STOPPED, done) if is_stopped else run_steps(steps, trainer, observers, watch)
            if exit_code == EXIT_STOPPED:
                done = checkpoints.saved
            for observer in observers:
                observer.at_end(exit_code, done)
    finally:
        gc.enable()  # observers/garbage.py
        records.close(is_fine=exit_code in (EXIT_DONE, EXIT_STOPPED))
    folder.look()
    records.report(exit_code, done, trainer.spikes.found)
    # A process that does not end with 0 has torchrun, and srun on other nodes, end those that are still writing.
    watch.at("waiting for the others to end", is_long=True, waits=True)
    dist.barrier(group=checkpoints.host)
    return exit_code, checkpoints


def _say_what_is_waited_for(say: Callable[[str], None], watch: Watchdog) -> None:
    """Tell people that their signal was heard, for a step and a checkpoint may take minutes."""
    step = watch.step  # the wish travels with its numbers, or with those of the next one if they are on their way
    say(f"finishing step {step} or {step + 1}, then a checkpoint" if step else "stopping before the first step")


def _before_action(watch: Watchdog, observers: Sequence[Observer], action: Action | None) -> None:
    watch.at_action(action)
    for observer in observers:
        observer.before_action(action)


def _is_stopped(stop: StopRequest, group: dist.ProcessGroup) -> bool:
    """Whether a signal has come to any rank before the first step, which may take long to compile."""
    stops = torch.tensor(int(stop.is_made))
    dist.all_reduce(stops, group=group)
    return bool(stops)
