"""Observer: says which steps are spikes, notes their samples, and saves the state that met one if that is asked for."""

from dtlayout.training.checkpoints import SPIKES, Checkpoints
from dtlayout.training.observer import ObservedStep, Observer
from dtlayout.training.records import Records
from dtlayout.training.resume import save
from dtlayout.training.trainer import Trainer


class SpikeObserver(Observer):
    """Compares each step with the trainer's `SpikeDetector`, then lets the detector count it."""

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints, records: Records):
        self.trainer, self.checkpoints, self.records = trainer, checkpoints, records
        self.detector = trainer.spikes

    def on_result(self, step: ObservedStep) -> None:
        step.is_spike = self.detector.is_spike(step.result)
        if step.is_spike:
            self._say(step)

    def pauses(self, step: ObservedStep) -> bool:
        """Whether the state before the step is saved."""
        return self.detector.keeps_state(step.number, step.result)

    def after_step(self, step: ObservedStep) -> None:
        if self.pauses(step):
            save(self.trainer, self.checkpoints, step.number - 1, SPIKES, is_last=False)
        self.detector.add(step.number, step.result)

    def _say(self, step: ObservedStep) -> None:
        limits, is_updated = self.detector.limits, self.detector.settings.action == "warn"
        loss, grad_norm = step.result.loss, step.result.grad_norm
        noted = self.records.note_samples(self.trainer.batches.samples, step.number, step.result, "spike")
        self.records.display.say(
            f"step {step.number}: a spike: loss {loss:.4f} (limit {limits.loss:.4f}), grad_norm {grad_norm:.3f} "
            f"(limit {limits.grad_norm:.3f}); {noted}; {'updated all the same' if is_updated else 'nothing is updated'}"
        )
