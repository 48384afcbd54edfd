"""Trackers of a run: the numbers of each step go to the trackers in `metrics.to`, TensorBoard or Weights & Biases.

The rank that writes opens a session of each tracker and gives it one step after the other. Training does not depend on
a tracker: one that fails is named once and dropped.
"""

import os
import pkgutil
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from dtlayout.base import toml
from dtlayout.base.files import write_whole
from dtlayout.spec.trackers import TRACKERS
from dtlayout.training.metrics import StepMetrics

_TAGS = {
    "loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/lr", "tokens": "train/tokens",
    "spike": "train/spike", "loss_scale": "train/loss_scale", "validation_loss": "validation/loss",
    "peak_memory_bytes": "memory/peak_memory_bytes", "peak_reserved_bytes": "memory/peak_reserved_bytes",
    "fullest_expert": "experts/fullest", "fullest_expert_block": "experts/fullest_block",
    "expert_imbalance": "experts/imbalance", "router_entropy": "experts/entropy", "router_square": "experts/square",
}  # fmt: skip
"""Field of StepMetrics → its name in a tracker; the others are of speed."""


def name_numbers(metrics: StepMetrics) -> dict[str, float]:
    """Numbers of a step under the names that trackers show: train/loss, validation/loss, speed/mfu, …"""
    numbers = asdict(metrics)
    del numbers["layout"]  # no number, and in the config
    del numbers["step"]
    named = numbers.pop("validation_losses") or {}
    numbers |= {f"validation/{name}": loss for name, loss in named.items()}
    return {
        _TAGS.get(name, name if "/" in name else f"speed/{name}"): value
        for name, value in numbers.items()
        if value is not None
    }


@dataclass(frozen=True, kw_only=True)
class Start:
    """Facts about a run that a session is made with."""

    folder: Path
    """The run folder; a session's files go to a folder in it, named like the tracker."""
    config: Mapping[str, Any]
    """Sections of the resolved config."""
    done: int
    """Optimizer steps that are done; the next numbers belong to the step after them."""
    noted: int
    """Last step whose numbers an earlier session may have; past `done` if that run was killed."""


class Session(Protocol):
    """One run in one tracker; an exception ends the session, not the run."""

    where: str
    """Command or address with which people see it."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of a step; its time is part of the step, so it should not wait."""

    def close(self, *, is_fine: bool) -> None:
        """Send the rest and end; `is_fine` if the run is done or was stopped."""


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, start: Start):
        folder = start.folder / "tensorboard"
        self.where = f"tensorboard --logdir {folder}"
        self.writer = import_module("torch.utils.tensorboard").SummaryWriter(
            str(folder),
            purge_step=start.done + 1,  # what a killed run wrote of later steps is hidden
            max_queue=1000,  # a full queue would make a step wait for the disk
            flush_secs=10,
        )
        indented = "".join(f"    {line}\n" for line in toml.dumps(start.config).splitlines())
        self.writer.add_text("config", indented, start.done + 1)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self, *, is_fine: bool) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of W&B; its files and its id lie in RUN/wandb, and WANDB_PROJECT, WANDB_MODE and so on hold."""

    def __init__(self, start: Start):
        wandb = import_module("wandb")
        folder = start.folder / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / "run-id"
        is_new = not kept.exists()
        if is_new:
            write_whole(kept, secrets.token_hex(4))
        self.run = wandb.init(
            dir=str(start.folder),
            project=os.environ.get("WANDB_PROJECT", "dtlayout"),
            name=start.folder.resolve().name,
            id=kept.read_text(encoding="utf-8"),
            resume="allow",
            config=dict(start.config),
            # Ranks wait for this one: for a key that nobody types, or in the end for the network, not for long.
            settings=wandb.Settings(console="off", silent=True, login_timeout=30, finish_timeout=60),
        )
        self.teardown = wandb.teardown
        is_offline = self.run.offline
        self.where = f"wandb sync {folder}/offline-run-*" if is_offline else str(self.run.url)
        # A step that W&B has cannot be written again. Its server says which one comes next; offline nobody does.
        self.last = self.run.step - 1 if not is_offline else -1 if is_new else start.noted

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if step > self.last:
            self.run.log(dict(numbers), step=step, commit=True)

    def close(self, *, is_fine: bool) -> None:
        try:
            self.run.finish(exit_code=0 if is_fine else 1)
        finally:
            self.teardown()  # its process


class Trackers:
    """The working sessions of one run; none before `open`."""

    def __init__(self, say: Callable[[str], None]):
        """`say` prints a line."""
        self.say = say
        self.sessions: dict[str, Session] = {}

    def open(self, names: Sequence[str], start: Start) -> None:
        """Begin a session of each tracker, which takes a second or two."""
        for name in names:
            try:
                self.sessions[name] = pkgutil.resolve_name(TRACKERS[name].session)(start)
            except Exception as error:  # anything: it is another program
                self._say_lost(name, "cannot be opened", error)
            else:
                self.say(f"{name}: {self.sessions[name].where}")

    def write(self, metrics: StepMetrics) -> None:
        """Send a step to each session."""
        self._write(metrics.step, name_numbers(metrics) if self.sessions else {})

    def write_start(self, loss: float, named: Mapping[str, float]) -> None:
        """Send the validation losses before the first step, as those of step 0."""
        self._write(0, {"validation/loss": loss, **{f"validation/{name}": each for name, each in named.items()}})

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, session in list(self.sessions.items()):
            try:
                session.write(step, numbers)
            except Exception as error:
                del self.sessions[name]
                self._say_lost(name, f"failed after step {step} and is dropped", error)
                with suppress(Exception):  # what is left of it would speak up when Python ends
                    session.close(is_fine=False)

    def close(self, *, is_fine: bool) -> None:
        """End each session; `is_fine` if the run is done or was stopped."""
        while self.sessions:
            name, session = self.sessions.popitem()
            try:
                session.close(is_fine=is_fine)
            except Exception as error:
                self._say_lost(name, "was not closed", error)

    def _say_lost(self, name: str, what: str, error: Exception) -> None:
        reason = " ".join(str(error).split()) or "no reason given"
        self.say(f"note: {name} {what}: {type(error).__name__}: {reason}; metrics.jsonl has everything")
