"""Observer: says which steps overflow at the loss's factor, and lets the factor count each step."""

from dtlayout.checkpoint.optimizer_state import fill_state
from dtlayout.training.loss_scale import halve
from dtlayout.training.observer import ObservedStep, Observer
from dtlayout.training.records import Records
from dtlayout.training.trainer import Trainer


class LossScaleObserver(Observer):
    """Leaves out steps whose gradients overflow, and has the trainer's `LossScale` fall and grow."""

    def __init__(self, trainer: Trainer, records: Records):
        self.trainer, self.records = trainer, records

    def on_result(self, step: ObservedStep) -> None:
        if not step.result.overflows:
            return
        assert step.result.loss_scale is not None, "what is not scaled does not overflow"
        self.records.skipped.append(step.number)
        self.records.display.say(
            f"step {step.number}: gradients overflow at the loss scale {step.result.loss_scale:g}: nothing is updated; "
            f"it is {halve(step.result.loss_scale):g} from now on"
        )
        # A checkpoint has the state of every trained parameter.
        trainer, config = self.trainer, self.trainer.config
        fill_state(trainer.optimizer, trainer.assembly.modules, config.model, config.optimizer)

    def after_step(self, step: ObservedStep) -> None:
        if self.trainer.loss_scale is not None:
            self.trainer.loss_scale.add(step.result)
