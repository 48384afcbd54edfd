"""Observer: notes the samples of a step that is not finite, and decides whether the run goes on without it."""

from dtlayout.base.errors import EXIT_NON_FINITE
from dtlayout.checkpoint.optimizer_state import fill_state
from dtlayout.training.observer import ObservedStep, Observer
from dtlayout.training.records import Records
from dtlayout.training.trainer import Trainer

MAX_SKIPPED = 10
"""Largest number of steps in a row that are skipped; after so many the data are not the reason, and the run ends."""


class NonFiniteObserver(Observer):
    """Skips steps whose loss or gradient norm is NaN or infinite, or ends the run, as `train.on_nonfinite` says."""

    def __init__(self, trainer: Trainer, records: Records):
        self.trainer, self.records = trainer, records
        self._found: list[int] = []

    def on_result(self, step: ObservedStep) -> None:
        if not step.result.is_finite and not step.result.overflows and not self._skip(step):
            step.exit_code = EXIT_NON_FINITE

    def _skip(self, step: ObservedStep) -> bool:
        """Note the samples of a step; whether the run goes on with the next one."""
        found, number, config = self._found, step.number, self.trainer.config
        found.append(number)
        self.records.skipped.append(number)
        in_a_row = found[-MAX_SKIPPED:] == list(range(number - MAX_SKIPPED + 1, number + 1))
        goes_on = config.train.on_nonfinite == "skip" and not in_a_row
        noted = self.records.note_samples(self.trainer.batches.samples, number, step.result, "nonfinite")
        say = self.records.display.say
        say(
            f"step {number}: loss {step.result.loss}, grad_norm {step.result.grad_norm}: nothing is updated; "
            f"{noted}; {'skipped' if goes_on else 'stopped'}"
        )
        if in_a_row and config.train.on_nonfinite == "skip":
            say(f"{MAX_SKIPPED} steps in a row were not finite: resume from an older checkpoint")
        if goes_on:
            # A checkpoint has the state of every trained parameter.
            fill_state(self.trainer.optimizer, self.trainer.assembly.modules, config.model, config.optimizer)
        return goes_on
