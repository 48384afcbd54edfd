"""Checkpoints of a run: loads the newest one at the start, saves others, and exports the weights at the end."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dtlayout.base.checkpoint_names import CHECKPOINTS, list_checkpoints, read_step
from dtlayout.base.errors import CheckpointError, DtlayoutError
from dtlayout.base.formatting import format_bytes, plural
from dtlayout.base.version import VERSION
from dtlayout.checkpoint.adapter import export_adapter
from dtlayout.checkpoint.agreement import RepeatedPlanner
from dtlayout.checkpoint.background import Saving
from dtlayout.checkpoint.copies import HeldState, HostCopies
from dtlayout.checkpoint.folder import check_own, clean, set_aside
from dtlayout.checkpoint.hf import export_weights
from dtlayout.checkpoint.manifest import find_checkpoint
from dtlayout.checkpoint.sharded import collect_state, find_intact, load_checkpoint, read_origin, save_checkpoint
from dtlayout.config.config import Config
from dtlayout.mesh.build import open_host_group
from dtlayout.models.beside import KEPT
from dtlayout.models.peft import find_export_notes
from dtlayout.models.weights import describe_cut_rows
from dtlayout.plans.disk import DiskState, DiskUnit
from dtlayout.training.watchdog import SPARE_S, Watchdog

SPIKES = "spikes"
"""Folder for states that met a spike, kept for people to look at."""


class Checkpoints:
    """The folders that hold a run's state; all ranks load and save together."""

    def __init__(self, config: Config, say: Callable[[str], None], watch: Watchdog, look: Callable[[], None]):
        """Open the groups that ranks save and load over, and find the newest intact checkpoint: `newest`, or None.

        Newer checkpoints that are damaged are moved aside. `say` prints a line for people. `look` is called before
        anything in the folders is published or removed: `Lease.check`.
        """
        self.config = config
        self.folder = Path(config.train.run_folder)
        self.say, self.look = say, look
        self.watch = watch
        limits = config.train.timeout_s + SPARE_S, config.checkpoint.timeout_s + SPARE_S
        self.host = open_host_group(*limits)
        settings = config.checkpoint
        self.background = open_host_group(*limits) if settings.is_in_background else None
        self.saving: Saving | None = None
        self.planner = RepeatedPlanner()
        self.saved = 0
        """Steps that are done in the newest checkpoint of this start, the one that it began from included."""
        self.newest = self._find_newest()

    def _find_newest(self) -> Path | None:
        self.watch.at("looking for a checkpoint", is_long=True)
        folder, falls_back = self.folder / CHECKPOINTS, self.config.checkpoint.fallback == "previous"
        for each in (folder, self.folder / SPIKES):
            check_own(each)  # by each rank, so that none waits for one that has refused
        newest = find_intact(folder, self.say, falls_back=falls_back, group=self.host)
        if dist.get_rank() == 0:
            clean(folder, self.look)
            clean(self.folder / SPIKES, self.look)
            if newest is not None:
                set_aside(newest, self.look)
        return newest

    def serve(
        self,
        modules: list[nn.Module],
        optimizer: torch.optim.Optimizer,
        device_type: str,
        disk: DiskState | None = None,
    ) -> None:
        """Load and save this state from now on.

        `device_type` is where parameters and optimizer state lie, which may be pages of files on `disk`.
        """
        self.modules, self.optimizer, self.disk = modules, optimizer, disk
        self.copies = HeldState(optimizer, self._hold_update) if disk else HostCopies(optimizer, device_type)
        if disk:
            self.planner.use = disk.follow(DiskUnit.drop)

    def load(self) -> tuple[int, dict[str, Any]]:
        """Fill the state from the newest checkpoint; the steps that it has done, and the `origin` saved with it."""
        assert self.newest is not None, "somebody asked whether there is one"
        self.watch.at("loading a checkpoint", is_long=True)
        model, settings = self.config.model, self.config.optimizer
        if self.disk:
            use = self.disk.follow(DiskUnit.write_out)
            done = load_checkpoint(self.newest, self.modules, self.optimizer, model, settings, group=self.host, use=use)
            self.disk.settle()
        else:
            done = load_checkpoint(self.newest, self.modules, self.optimizer, model, settings, group=self.host)
        check_steps_left(self.newest, done, self.config.train.steps)
        self.say(f"resumed from {self.newest} after {plural(done, 'step')}")
        self.saved = done
        return done, read_origin(self.newest)

    def prepare(self) -> None:
        """Begin to make memory for copies of the state, if checkpoints are written from such; once there is a state."""
        if self.background is None:
            return
        tensors = collect_state(self.modules, self.optimizer, self.config.model, self.config.optimizer)
        if nbytes := self.copies.prepare(tensors):
            self.say(f"{format_bytes(nbytes)} of the host's memory are pinned for saves, while training goes on")

    def save(
        self, step: int, folder: str, *, resolved: Config, samples: int, origin: dict[str, Any], is_last: bool
    ) -> None:
        """Save the state after `step` steps into RUN/`folder`, in the background if that is asked for.

        `samples` is how many all steps have seen, `resolved` reproduces the run, and `load` returns `origin`.
        CheckpointError if the last checkpoint is not saved; if another one is not, a line says so.
        """
        config, settings, layout = self.config, self.config.optimizer, resolved.layout
        facts = {
            "step": step,
            "samples": samples,
            "layout": str(layout),
            "ranks": layout.world_size,
            "versions": {"dtlayout": VERSION, "torch": torch.__version__},
            "config": resolved.to_toml(),
        }
        facts |= {"base": origin["base"]} if "base" in origin else {}  # the frozen model beside an adapter
        self.finish()
        self.watch.at("saving", is_long=True)
        tensors = collect_state(self.modules, self.optimizer, config.model, settings)
        in_background = self.background is not None and not is_last
        wait_for_copies = self.copies.take(tensors) if in_background else lambda: tensors

        def write() -> Path:
            saved = save_checkpoint(
                self.folder / folder, step, wait_for_copies(), config.model, settings, keep=config.checkpoint.keep,
                origin=origin, facts=facts, group=self.background or self.host, planner=self.planner, look=self.look,
            )  # fmt: skip
            if self.disk:
                self.disk.drop()
            return saved

        if in_background:
            self.saving = Saving(step, write)
        elif is_last:
            self.say(f"saved {write()}")
        else:
            self._say_saved(step, write)
        if folder == CHECKPOINTS:
            self.saved = step

    def finish(self, *, waits: bool = True) -> None:
        """Say how the save in the background has ended; wait for its end, or without `waits` return if it goes on."""
        if self.saving is None or not (waits or self.saving.is_done):
            return
        saving, self.saving = self.saving, None
        self.watch.at("waiting for a save", is_long=True)
        if not saving.is_done:
            self.say(f"waiting for the save of step {saving.step}, which is still being written")
        self._say_saved(saving.step, saving.wait)

    def _hold_update(self) -> None:
        """Wait until a save in the background has written the state that an update is about to change."""
        if self.saving is not None and not self.saving.is_done:
            self.watch.at("waiting for a save before the update", is_long=True)
            self.saving.wait_for_end()
            self.watch.at("the update")

    def _say_saved(self, step: int, wait: Callable[[], Path]) -> None:
        """Print where a step was saved, or why it was not; the run goes on either way."""
        try:
            self.say(f"saved {wait()}")
        except CheckpointError as error:
            self.say(f"note: step {step} is not saved, training goes on and the next save tries again: {error}")

    def go_back(self, done: int, bad: Collection[int]) -> None:
        """Set those checkpoints aside after which no step was fine, since the next start would end like this one.

        One rank calls this. `bad` holds the steps until `done` that were spikes or not finite. The last update before
        such a checkpoint may be the reason, although no number before it shows that. If all checkpoints are of this
        kind, one stays.
        """
        while done in bad:
            done -= 1
        found = list_checkpoints(self.folder / CHECKPOINTS)
        fine = [path for path in found if read_step(path) < done]
        if len(fine) == len(found):
            return
        problem = f"note: no step after {found[len(fine)]} was fine"
        if not fine:
            self.say(f"{problem}: there is no older checkpoint to go back to: move it away to begin anew")
            return
        try:
            aside = ", ".join(path.name for path in set_aside(fine[-1], self.look, "nonfinite"))
            self.say(f"{problem}: it is set aside as {aside}, and {fine[-1]} is the newest")
        except OSError as error:
            self.say(f"{problem}, and it cannot be set aside: {error.strerror}")

    def export(self) -> None:
        """On one rank, write the weights of the newest checkpoint to RUN/hf, in the format of the computation.

        Of a model with an adapter that is the adapter alone, in the format of what is trained.
        """
        config = self.config
        beside: dict[str, Any] = {"data": config.data, "base": self.folder / KEPT}
        try:
            self.look()
            checkpoint, folder = find_checkpoint(self.folder), self.folder / "hf"
            if config.model.adapter is not None:
                export_adapter(checkpoint, folder, number_format=config.precision.params, **beside)
                for line in find_export_notes(config.model):
                    self.say(f"note: {line}")
            else:
                number_format, max_seq_len = config.precision.compute, config.batch.seq_len
                export_weights(checkpoint, folder, number_format=number_format, max_seq_len=max_seq_len, **beside)
                for line in describe_cut_rows(config.model):
                    self.say(f"note: {line}")
            self.say(f"exported {self.folder / 'hf'}")
        except (DtlayoutError, OSError) as error:  # the run is done all the same
            self.say(f"not exported: {error}; dtlayout convert {self.folder} FOLDER tries again")


def check_steps_left(checkpoint: Path, done: int, num_steps: int) -> None:
    """CheckpointError if a checkpoint has done more steps than the run is to do."""
    if done > num_steps:
        raise CheckpointError(
            f"{checkpoint} has done {plural(done, 'step')}, more than train.steps={num_steps}; raise train.steps, or "
            f"use another train.run_folder"
        )
