"""Observer: timeline.json, when each pipeline rank did what in some steps."""

from contextlib import AbstractContextManager, nullcontext

from dtlayout.base.errors import EXIT_NON_FINITE
from dtlayout.schedules.actions import Action
from dtlayout.training.build import Assembly
from dtlayout.training.observer import ObservedStep, Observer
from dtlayout.training.records import Records
from dtlayout.training.timeline import TimelineRecorder
from dtlayout.training.watchdog import Watchdog


class TimelineObserver(Observer):
    """Records the third step of a start and every `every`-th after it: not those whose memory is measured."""

    def __init__(
        self, recorder: TimelineRecorder, assembly: Assembly, records: Records, watch: Watchdog, first: int, every: int
    ):
        """`first` is the number of the start's first step whose batch is whole."""
        self.recorder, self.records, self.watch, self.first, self.every = recorder, records, watch, first, every
        assembly.runtime.after_input = recorder.after_input
        for sync in assembly.sync:
            sync.observe(recorder.transfer)

    def is_recorded(self, number: int) -> bool:
        """Whether a step is recorded."""
        since = number - self.first
        return since == 2 or (since > 2 and (number - 1) % self.every == 2 % self.every)

    def around_launch(self, number: int) -> AbstractContextManager[object]:
        if self.is_recorded(number):
            self.recorder.begin()
        return nullcontext()

    def before_action(self, action: Action | None) -> None:
        self.recorder.before_action(action)

    def after_step(self, step: ObservedStep) -> None:
        if not self.is_recorded(step.number) or step.exit_code == EXIT_NON_FINITE:
            return
        self.watch.at("gathering its timeline", waits=True)
        if (timeline := self.recorder.gather()) is not None:
            self.records.write_timeline(step.number, timeline)
