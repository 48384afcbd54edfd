"""Observer: saves checkpoints when they are due and when the run ends."""

from dtlayout.base.checkpoint_names import CHECKPOINTS
from dtlayout.base.errors import EXIT_NON_FINITE
from dtlayout.training.checkpoints import Checkpoints
from dtlayout.training.observer import ObservedStep, Observer
from dtlayout.training.records import Records
from dtlayout.training.resume import save
from dtlayout.training.trainer import Trainer


class SaveObserver(Observer):
    """Saves the state into RUN/checkpoints, and at the end sets those aside that led to a loss that is not finite."""

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints, records: Records):
        self.trainer, self.checkpoints, self.records = trainer, checkpoints, records
        self.settings = trainer.config.checkpoint
        self.is_prepared = False

    def pauses(self, step: ObservedStep) -> bool:
        """Whether the state is saved after a step: it is due, or has been due since a step that was not finite.

        A state that led to such a step would push out one from before it.
        """
        every, saved = self.settings.every, self.checkpoints.saved
        is_due = every > 0 and step.number // every > saved // every
        is_fine = step.exit_code != EXIT_NON_FINITE
        return self.settings.save and is_fine and (step.is_over or (is_due and step.result.is_finite))

    def after_step(self, step: ObservedStep) -> None:
        self.checkpoints.finish(waits=False)
        if not self.is_prepared and step.result.is_finite and not step.is_over:
            self.checkpoints.prepare()  # the first update has made the optimizer's state
            self.is_prepared = True
        if self.pauses(step):
            save(self.trainer, self.checkpoints, step.number, CHECKPOINTS, is_last=step.is_over)

    def at_end(self, exit_code: int, done: int) -> None:
        self.checkpoints.finish()
        if exit_code == EXIT_NON_FINITE and self.records.is_writer:
            self.checkpoints.go_back(done, {*self.records.skipped, *self.trainer.spikes.found})
