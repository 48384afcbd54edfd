"""An observer as somebody adds it who has no checkout: the step with the largest loss."""

from dtlayout import Observer, register_observer


class WorstStep(Observer):
    """RUN/worst_step.txt, a step and its loss."""

    def __init__(self, run):
        self.run, self.steps = run, []

    def after_step(self, step):
        self.steps.append((step.result.loss, step.number))

    def at_end(self, exit_code, done):
        if self.run.is_writer and self.steps:
            loss, number = max(self.steps)
            (self.run.folder / "worst_step.txt").write_text(f"{number} {loss}\n")
            self.run.say(f"step {number} of {done} had the largest loss")


register_observer("worst-step", f"{__name__}:WorstStep")
