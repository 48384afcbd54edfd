"""Observer: the loss of data that nothing is trained on, at times and after the last step."""

from dtlayout.base.errors import EXIT_STOPPED
from dtlayout.config.sections import ValidationConfig
from dtlayout.training.batches import Batches
from dtlayout.training.observer import ObservedStep, Observer
from dtlayout.training.trainer import Trainer


class ValidationObserver(Observer):
    """Measures the mean loss of the first held-out batches, each time the same ones."""

    def __init__(self, trainer: Trainer, held_out: Batches, settings: ValidationConfig):
        self.trainer, self.held_out, self.settings = trainer, held_out, settings

    def pauses(self, step: ObservedStep) -> bool:
        """Whether the step is validated: not where somebody who asked to stop waits, and not after a NaN."""
        every = self.settings.every
        is_due = step.is_over or (every > 0 and step.number % every == 0)
        return is_due and step.result.is_finite and not step.result.stop_requested

    def after_step(self, step: ObservedStep) -> None:
        """Note the loss; a signal ends the validation, and the run with it."""
        if not self.pauses(step):
            return
        step.validation_loss = self._measure()
        if step.validation_loss is None and not step.is_over:
            step.exit_code = EXIT_STOPPED

    def _measure(self) -> float | None:
        """The mean loss, nats a token; None if a signal came to any rank meanwhile."""
        num_batches = min(self.settings.batches, self.held_out.samples.num_batches)
        total, num_targets = 0.0, 0
        for number in range(num_batches):
            self.trainer.watch.at(f"validation, batch {number + 1}")
            batch = self.held_out.fetch(number)
            loss, count, is_stopped = self.trainer.step.evaluate(
                batch.tokens, batch.targets, batch.starts, stop=self.trainer.stop.is_made
            )
            if is_stopped:
                return None
            total, num_targets = total + loss * count, num_targets + count
        return total / max(1, num_targets)
