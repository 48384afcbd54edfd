"""Observer: the loss of data that nothing is trained on, at times, after the last step and perhaps before the first."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dtlayout.base.errors import EXIT_STOPPED
from dtlayout.config.sections import ValidationConfig
from dtlayout.training.batches import Batches
from dtlayout.training.observer import ObservedStep, Observer
from dtlayout.training.trainer import Trainer


@dataclass(frozen=True)
class HeldOut:
    """A set of [validation]."""

    batches: Batches
    num_batches: int
    """Global batches that are measured, each time the same first ones."""


class ValidationObserver(Observer):
    """Measures the mean loss of the first held-out batches of each set, each time the same ones."""

    def __init__(
        self,
        trainer: Trainer,
        held_out: Mapping[str, HeldOut],
        settings: ValidationConfig,
        note_start: Callable[[Mapping[str, float]], None] | None = None,
    ):
        """`note_start` gets the losses of sets by name before the first step; None where they are not measured then."""
        self.trainer, self.held_out, self.settings, self.note_start = trainer, held_out, settings, note_start

    def at_start(self) -> None:
        """Note the losses of the first weights; nothing where a signal ends that."""
        if self.note_start is not None and (losses := self._measure()) is not None:
            self.note_start(losses)

    def pauses(self, step: ObservedStep) -> bool:
        """Whether the step is validated: not where somebody who asked to stop waits, and not after a NaN."""
        every = self.settings.every
        is_due = step.is_over or (every > 0 and step.number % every == 0)
        return is_due and step.result.is_finite and not step.result.stop_requested

    def after_step(self, step: ObservedStep) -> None:
        """Note the losses; a signal ends the validation, and the run with it."""
        if not self.pauses(step):
            return
        losses = self._measure()
        if losses is not None:
            step.validation_loss = next(iter(losses.values()))
            step.validation_losses = {name: loss for name, loss in losses.items() if name} or None
        elif not step.is_over:
            step.exit_code = EXIT_STOPPED

    def _measure(self) -> dict[str, float] | None:
        """The mean loss of each set, nats a token; None if a signal came to any rank meanwhile."""
        losses = {}
        for name, held_out in self.held_out.items():
            loss = self._measure_set(name, held_out)
            if loss is None:
                return None
            losses[name] = loss
        return losses

    def _measure_set(self, name: str, held_out: HeldOut) -> float | None:
        total, num_targets = 0.0, 0
        for number in range(held_out.num_batches):
            self.trainer.watch.at(f"validation{f' {name}' * bool(name)}, batch {number + 1}")
            batch = held_out.batches.fetch(number)
            self.trainer.follow(batch)
            loss, count, is_stopped = self.trainer.step.evaluate(
                batch.tokens, batch.targets, batch.starts, stop=self.trainer.stop.is_made
            )
            if is_stopped:
                return None
            total, num_targets = total + loss * count, num_targets + count
        return total / max(1, num_targets)
