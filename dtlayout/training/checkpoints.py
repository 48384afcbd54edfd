"""A run's checkpoints: the one that it begins from, those that it leaves, and the weights that it exports."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dtlayout.base.errors import CheckpointError, DtlayoutError
from dtlayout.base.formatting import find_version, plural
from dtlayout.checkpoint.agreement import RepeatedPlanner
from dtlayout.checkpoint.background import Saving
from dtlayout.checkpoint.copies import HostCopies
from dtlayout.checkpoint.folder import check_own, clean, set_aside
from dtlayout.checkpoint.hf import export_weights
from dtlayout.checkpoint.manifest import CHECKPOINTS, find_checkpoint, list_checkpoints, read_step
from dtlayout.checkpoint.sharded import collect_state, find_intact, load_checkpoint, read_origin, save_checkpoint
from dtlayout.config.config import Config
from dtlayout.mesh.build import open_host_group
from dtlayout.models.beside import KEPT
from dtlayout.training.watchdog import SPARE_S, Watchdog

SPIKES = "spikes"
"""States that are kept to be looked at."""


class Checkpoints:
    """The folders of a run in which its state is, as all ranks use them together."""

    def __init__(self, config: Config, say: Callable[[str], None], watch: Watchdog, look: Callable[[], None]):
        """Open the groups that ranks save and load over, and find where the run begins; `say` gets lines for people.

        `look` is called before anything there is published or removed: `Lease.check`. `newest` is the newest checkpoint
        that is intact, or None; those that are newer are out of its way.
        """
        self.config = config
        self.folder = Path(config.train.run_folder)
        self.say, self.look = say, look
        self.watch = watch
        limits = config.train.timeout_s + SPARE_S, config.checkpoint.timeout_s + SPARE_S
        self.host = open_host_group(*limits)
        settings = config.checkpoint
        in_background = settings.save and settings.background and settings.every > 0
        self.background = open_host_group(*limits) if in_background else None
        self.saving: Saving | None = None
        self.planner = RepeatedPlanner()
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

    def serve(self, modules: list[nn.Module], optimizer: torch.optim.Optimizer, device_type: str) -> None:
        """From now on this is the state that is loaded and saved."""
        self.modules, self.optimizer = modules, optimizer
        self.copies = HostCopies(optimizer, device_type)

    def load(self) -> tuple[int, dict[str, Any]]:
        """Fill the state with the newest one: the steps that are done, and what was saved of where it came from."""
        assert self.newest is not None, "somebody asked whether there is one"
        self.watch.at("loading a checkpoint", is_long=True)
        model, settings = self.config.model, self.config.optimizer
        done = load_checkpoint(self.newest, self.modules, self.optimizer, model, settings, group=self.host)
        check_steps_left(self.newest, done, self.config.train.steps)
        self.say(f"resumed from {self.newest} after {plural(done, 'step')}")
        return done, read_origin(self.newest)

    def save(
        self, step: int, folder: str, *, resolved: Config, samples: int, origin: dict[str, Any], is_last: bool
    ) -> None:
        """Save the state into one of the folders, in the background if that is asked for.

        `samples` are all that the steps have seen, `resolved` reproduces the run, and `origin` is for `load`.
        CheckpointError if the `is_last` is not saved; without another one a run goes on.
        """
        config, settings, layout = self.config, self.config.optimizer, resolved.layout
        facts = {
            "step": step,
            "samples": samples,
            "layout": str(layout),
            "ranks": layout.world_size,
            "versions": {"dtlayout": find_version("dtlayout"), "torch": torch.__version__},
            "config": resolved.to_toml(),
        }
        self.watch.at("saving", is_long=True)
        self.finish()
        tensors = collect_state(self.modules, self.optimizer, config.model, settings.state)
        in_background = self.background is not None and not is_last
        wait_for_copies = self.copies.take(tensors) if in_background else lambda: tensors

        def write() -> Path:
            return save_checkpoint(
                self.folder / folder, step, wait_for_copies(), config.model, settings, keep=config.checkpoint.keep,
                origin=origin, facts=facts, group=self.background or self.host, planner=self.planner, look=self.look,
            )  # fmt: skip

        if in_background:
            self.saving = Saving(step, write)
        elif is_last:
            self.say(f"saved {write()}")
        else:
            self._say_saved(step, write)

    def finish(self, *, waits: bool = True) -> None:
        """Say how the save that is under way has ended; wait for it, or look only whether it has."""
        if self.saving is None or not (waits or self.saving.is_done):
            return
        saving, self.saving = self.saving, None
        self.watch.at("waiting for a save", is_long=True)
        if not saving.is_done:
            self.say(f"waiting for the save of step {saving.step}, which is still being written")
        self._say_saved(saving.step, saving.wait)

    def _say_saved(self, step: int, wait: Callable[[], Path]) -> None:
        """The checkpoint of a step, or why there is none; a run goes on without."""
        try:
            self.say(f"saved {wait()}")
        except CheckpointError as error:
            self.say(f"note: step {step} is not saved, training goes on and the next save tries again: {error}")

    def go_back(self, done: int, bad: Collection[int]) -> None:
        """On one rank, set checkpoints aside from which no step was fine: the next start would end like this one.

        `bad` are steps until `done` whose numbers were not fine. The last update of such a checkpoint may be the
        reason, which no number before it tells. One of them stays if there is no other.
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
        """On one rank, the weights as they were saved last, in the format that was computed in."""
        config = self.config
        try:
            self.look()
            export_weights(
                find_checkpoint(self.folder),
                self.folder / "hf",
                number_format=config.precision.compute,
                max_seq_len=config.batch.seq_len,
                data=config.data,
                base=self.folder / KEPT,
            )
            self.say(f"exported {self.folder / 'hf'}")
        except (DtlayoutError, OSError) as error:  # the run is done all the same
            self.say(f"not exported: {error}; dtlayout convert {self.folder} FOLDER tries again")


def check_steps_left(checkpoint: Path, done: int, num_steps: int) -> None:
    """CheckpointError if a checkpoint is further than the run wants to go."""
    if done > num_steps:
        raise CheckpointError(
            f"{checkpoint} has done {plural(done, 'step')}, more than train.steps={num_steps}; raise train.steps, or "
            f"use another train.run_folder"
        )
