"""Trainer: model, optimizer, learning rate and batches of one rank, and the launch of a step with them."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from dtlayout.base.errors import EXIT_DONE, EXIT_STOPPED
from dtlayout.base.signals import StopRequest
from dtlayout.checkpoint.first_checkpoint import load_saved_weights
from dtlayout.checkpoint.first_weights import load_weights
from dtlayout.checkpoint.frozen_base import FrozenBase
from dtlayout.config.config import Config
from dtlayout.data.samples import Seen
from dtlayout.models.first_source import find_place
from dtlayout.models.peft import find_base_folder, is_peft
from dtlayout.pipelining.schedule import Schedule, make_schedule
from dtlayout.plans.init import initialize
from dtlayout.spec.batch import Batch, count_steps_until
from dtlayout.spec.layout import Layout, OpenLayout
from dtlayout.training.batches import Batches, OwnBatch
from dtlayout.training.build import Assembly, assemble
from dtlayout.training.devices import wait_for_device
from dtlayout.training.loss_scale import LossScale
from dtlayout.training.observer import ObservedStep
from dtlayout.training.optimizer import LearningRate, build_optimizer, set_learning_rate
from dtlayout.training.result import StepResult
from dtlayout.training.spikes import SpikeDetector
from dtlayout.training.start import RunInputs
from dtlayout.training.step import Launched, TrainStep
from dtlayout.training.watchdog import SPARE_S, Watchdog


@dataclass(kw_only=True)
class Trainer:
    """The parts of a rank that a step reads or changes; `resume` replaces some of them."""

    config: Config
    layout: Layout
    assembly: Assembly
    optimizer: torch.optim.Optimizer
    step: TrainStep
    batches: Batches
    learning_rate: LearningRate
    spikes: SpikeDetector
    """Gives each step the limits above which it updates nothing."""
    loss_scale: LossScale | None
    """Gives each step the factor of its loss; None where losses are not scaled."""
    stop: StopRequest
    watch: Watchdog
    base: FrozenBase | None = None
    """The frozen model beside an adapter, which checkpoints name; None without an adapter."""
    schedules: dict[int, Schedule] = field(default_factory=dict)
    """Number of microbatches → the schedule of steps that have so many, once there was one."""

    def fetch_ahead(self, steps: range) -> Iterator[OwnBatch]:
        """Batches of steps by their numbers, from 1; a thread reads the next one meanwhile."""
        return self.batches.fetch_ahead(range(steps.start - 1, steps.stop - 1))

    def launch(self, number: int, batch: OwnBatch) -> Launched:
        """Give the device a step, by its number from 1, without waiting for it."""
        self.follow(batch)
        set_learning_rate(self.optimizer, self.learning_rate.at(number - 1))
        self.watch.at("counting its targets", waits=True)
        limits = self.spikes.step_limits
        scale = None if self.loss_scale is None else self.loss_scale.value
        return self.step.launch(
            batch.tokens, batch.targets, batch.starts, stop=self.stop.is_made, limits=limits, loss_scale=scale
        )

    def follow(self, batch: OwnBatch) -> None:
        """Have the pipeline run as many microbatches as a batch has, which are fewer in a ramp."""
        num_rows = batch.tokens.shape[0]
        m = num_rows // self.layout.micro_batch
        if m == self.assembly.runtime.schedule.num_microbatches:
            return
        if m not in self.schedules:
            size = replace(self.config.batch, global_batch=num_rows * self.layout.dp)
            self.schedules[m] = make_schedule(self.layout, size)
        self.assembly.runtime.follow(self.schedules[m])

    def describe(self, number: int, batch: OwnBatch, result: StepResult) -> ObservedStep:
        """A step that has just got its numbers, and whether the run ends with it if nothing else comes up."""
        is_last = number == self.config.train.steps
        return ObservedStep(
            number=number,
            result=result,
            lr=self.learning_rate.at(number - 1),
            tokens=self.count_seen(number).tokens,
            batch=self.find_batch(number),
            data_wait_s=batch.wait_s,
            exit_code=EXIT_DONE if is_last else EXIT_STOPPED if result.stop_requested else None,
        )

    def wait_for_update(self) -> None:
        """Wait for all that the device was given."""
        wait_for_device(self.batches.device_type)

    def count_seen(self, done: int) -> Seen:
        """Samples and tokens that `done` steps have read."""
        return self.batches.samples.seen.after(done, self.config.batch, self.config.train.batch_ramp)

    def find_batch(self, number: int) -> Batch:
        """Sizes of the global batch of a step, by its number from 1."""
        return replace(self.config.batch, global_batch=self.batches.samples.size_of(number - 1))

    def find_first_whole(self, first: int) -> int:
        """Number of the first step from `first` on whose batch no ramp makes smaller; steps count from 1."""
        samples, ramp = self.batches.samples, self.config.train.batch_ramp
        seen = samples.count_before(first - 1)
        return first + (count_steps_until(ramp[-1].until, seen, samples.sizes.global_batch, ramp) if ramp else 0)

    def resolve(self) -> Config:
        """A config that reproduces the run: its layout is decided, and so are the steps of its learning rate."""
        steps, length = self.config.train.steps, self.learning_rate.decay_steps
        optimizer = replace(self.config.optimizer, decay_steps=0 if length == steps else length)
        return replace(self.config, layout=OpenLayout(**asdict(self.layout)), optimizer=optimizer)


def build_trainer(
    inputs: RunInputs,
    watch: Watchdog,
    group: dist.ProcessGroup,
    *,
    is_new: bool,
    base: FrozenBase | None = None,
    first: Path | None = None,
) -> Trainer:
    """Build the model and all that trains it.

    Weights are those that `_find_weights` chooses; ranks read them together over `group`. `base` is the frozen model
    beside an adapter, and `first` the checkpoint of another run with which a new run starts.
    """
    config, layout, device_type = inputs.config, inputs.layout, inputs.device.type
    model, rank = config.model, dist.get_rank()
    batches = Batches(
        inputs.samples, device_type,
        has_documents=config.data.document_mask, layout=layout, rank=rank,
    )  # fmt: skip
    watch.at("building the model", is_long=True)
    assembly = assemble(
        model, config.batch, layout, inputs.chosen.kernels, config.precision,
        seed=config.train.seed, device_type=device_type, timeout_s=config.train.timeout_s + SPARE_S,
        give_weights=_find_weights(config, group, is_new=is_new, first=first),
    )  # fmt: skip
    optimizer = build_optimizer(assembly.modules, model, config.optimizer, assembly.disk)
    step = TrainStep(assembly.runtime, optimizer, max_norm=config.optimizer.max_norm, mesh=assembly.mesh, model=model)
    return Trainer(
        config=config, layout=layout, assembly=assembly, optimizer=optimizer, step=step, batches=batches,
        learning_rate=LearningRate.of(config.optimizer, config.train.steps, {}), spikes=SpikeDetector(config.spikes),
        loss_scale=LossScale.of(config), stop=inputs.stop, watch=watch, base=base,
    )  # fmt: skip


def _find_weights(config: Config, group: dist.ProcessGroup, *, is_new: bool, first: Path | None) -> Callable[..., None]:
    """A function that gives modules their first weights: those of `train.init_from`, or drawn ones.

    A run that goes on gets all that trains from its checkpoint, and so only what is frozen beside an adapter is read.
    """
    if not starts_from_folder(config, is_new=is_new):
        return initialize
    folder = find_place(config.train.init_from)
    if first is not None:
        base = find_base_folder(folder) if config.model.adapter is not None else None
        return partial(load_saved_weights, first, base=base, group=group)
    adapter = folder if is_new and is_peft(folder) else None
    new_rows = config.train.new_rows
    return partial(load_weights, find_base_folder(folder), adapter=adapter, group=group, new_rows=new_rows)


def starts_from_folder(config: Config, *, is_new: bool) -> bool:
    """Whether weights are read from `train.init_from`."""
    return bool(config.train.init_from) and (is_new or config.model.adapter is not None)
