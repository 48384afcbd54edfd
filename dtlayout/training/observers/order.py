"""All observers of a run, in the order in which they are told of each step."""

import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from dtlayout.config.config import Config
from dtlayout.data.samples import Samples
from dtlayout.spec.layout import Layout
from dtlayout.training.checkpoints import Checkpoints
from dtlayout.training.memory import MemoryMeter
from dtlayout.training.observer import OBSERVERS, Observer
from dtlayout.training.observers.folder import FolderObserver
from dtlayout.training.observers.garbage import GarbageObserver
from dtlayout.training.observers.kernels import KernelObserver
from dtlayout.training.observers.loss_scale import LossScaleObserver
from dtlayout.training.observers.memory import MemoryObserver, PeakObserver
from dtlayout.training.observers.nonfinite import NonFiniteObserver
from dtlayout.training.observers.saves import SaveObserver
from dtlayout.training.observers.spikes import SpikeObserver
from dtlayout.training.observers.timeline import TimelineObserver
from dtlayout.training.observers.validation import HeldOut, ValidationObserver
from dtlayout.training.records import Records
from dtlayout.training.start import RunInputs
from dtlayout.training.timeline import TimelineRecorder
from dtlayout.training.trainer import Trainer
from dtlayout.training.watchdog import SPARE_S


@dataclass(frozen=True, kw_only=True)
class ObservedRun:
    """Facts about a run that a registered observer is made with, on every rank."""

    config: Config
    """The resolved config."""
    layout: Layout
    folder: Path
    """The run folder."""
    is_writer: bool
    """Whether this rank may write into the folder; one does."""
    steps: range
    """Numbers of the steps that this start is going to train, from 1 where nothing was resumed."""
    modules: Sequence[nn.Module]
    """This rank's stages of the model."""
    optimizer: torch.optim.Optimizer
    say: Callable[[str], None]
    """Prints a line on the rank that writes, above the progress bar."""


def make_observers(
    inputs: RunInputs,
    trainer: Trainer,
    checkpoints: Checkpoints,
    records: Records,
    folder: FolderObserver,
    steps: range,
) -> list[Observer]:
    """The observers of a start that trains `steps`, in order; `folder` is the first of them."""
    config, device, kernels = inputs.config, inputs.device, inputs.chosen.kernels
    assembly, group = trainer.assembly, checkpoints.host
    meter = MemoryMeter(device.type, assembly.modules, trainer.optimizer, state_on=inputs.layout.state_place)
    # On a CPU a step whose storages are tracked runs uncompiled, with other bits and another peak.
    has_peaks = device.type == "cuda" or kernels.compile == "none"
    memory = MemoryObserver(meter, records, inputs.layout, group, steps, config.metrics, has_peaks=has_peaks)
    validation: list[Observer] = []
    if inputs.held_out:
        held_out = {name: _hold_out(name, samples, config, trainer) for name, samples in inputs.held_out.items()}
        note_start = records.note_start if config.validation.at_start and steps.start == 1 else None
        validation.append(ValidationObserver(trainer, held_out, config.validation, note_start))
    timeline: list[Observer] = []
    if config.metrics.timeline:
        recorder = TimelineRecorder(device.type, inputs.layout, config.train.timeout_s + SPARE_S)
        every = config.metrics.memory_every
        timeline.append(
            TimelineObserver(recorder, assembly, records, trainer.watch, trainer.find_first_whole(steps.start), every)
        )
    return [
        folder,
        KernelObserver(assembly.runtime, kernels.attention, records, group, steps.start),
        NonFiniteObserver(trainer, records),
        memory,
        *validation,
        PeakObserver(memory),
        records,  # metrics.jsonl, trackers and the display
        *timeline,
        SpikeObserver(trainer, checkpoints, records),
        LossScaleObserver(trainer, records),
        SaveObserver(trainer, checkpoints, records),
        GarbageObserver(config.train.collect_every),
        *_make_registered(trainer, records, steps),
    ]


def _hold_out(name: str, samples: Samples, config: Config, trainer: Trainer) -> HeldOut:
    most = config.count_held_out_batches(name)
    num_batches = min(most, samples.num_batches) if most else samples.num_batches
    return HeldOut(replace(trainer.batches, samples=samples), num_batches)


def _make_registered(trainer: Trainer, records: Records, steps: range) -> Iterator[Observer]:
    """Observers that `register_observer` has added, in the order of their registration."""
    run = ObservedRun(
        config=trainer.resolve(), layout=trainer.layout, folder=records.folder, is_writer=records.is_writer,
        steps=steps, modules=trainer.assembly.modules, optimizer=trainer.optimizer, say=records.display.say,
    )  # fmt: skip
    for place in OBSERVERS.values():
        yield pkgutil.resolve_name(place)(run)
