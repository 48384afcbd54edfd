"""Observers: memory.json with the curve of the first steps, and the peak of some steps for metrics.jsonl."""

from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist

from dtlayout.config.sections import MetricsConfig
from dtlayout.schedules.actions import Action
from dtlayout.spec.layout import Layout
from dtlayout.training.memory import MemoryMeter
from dtlayout.training.observer import ObservedStep, Observer
from dtlayout.training.records import Records

STEPS_DRAWN = 4
"""How many steps of a run memory.json shows."""


class MemoryObserver(Observer):
    """Measures the memory of steps while they are launched, and writes the curve of the first ones."""

    def __init__(
        self,
        meter: MemoryMeter,
        records: Records,
        layout: Layout,
        group: dist.ProcessGroup,
        steps: range,
        settings: MetricsConfig,
        *,
        has_peaks: bool,
    ):
        """`steps` are the numbers of the steps of this start; without `has_peaks` no peak is measured.

        Curves of all ranks come together over `group`.
        """
        self.meter, self.records, self.layout, self.group, self.steps = meter, records, layout, group, steps
        self.every, self.has_peaks = settings.memory_every, has_peaks
        self.num_drawn = STEPS_DRAWN if settings.memory and steps.start == 1 else 0
        records.num_slow = max(records.num_slow, self.num_drawn)
        self.is_drawn = False
        """Whether the step that was launched last is one of the curve's."""

    def has_peak(self, number: int) -> bool:
        """Whether the peak of a step is measured; never the first one's, in which the optimizer's state is made."""
        since = number - self.steps.start
        is_due = (number - 1) % self.every == 0 or number == self.steps[-1]
        return self.has_peaks and (since == 1 or (since > 0 and is_due))

    def around_launch(self, number: int) -> AbstractContextManager[object]:
        self.is_drawn = number <= self.num_drawn
        return self.meter.watch() if self.is_drawn or self.has_peak(number) else nullcontext()

    def before_action(self, action: Action | None) -> None:
        if self.is_drawn:
            self.meter.mark(action)

    def after_step(self, step: ObservedStep) -> None:
        if self.is_drawn and (step.is_over or step.number == self.num_drawn):
            self.records.write_curves(step.number, self.meter.gather_curves(self.layout, self.group))


class PeakObserver(Observer):
    """Asks all ranks for the peak of a step that was measured; it comes after validation, which counts too."""

    def __init__(self, memory: MemoryObserver):
        self.memory = memory

    def after_step(self, step: ObservedStep) -> None:
        if self.memory.has_peak(step.number) and step.result.is_finite:
            meter, records = self.memory.meter, self.memory.records
            step.peak_bytes = max(meter.gather_peaks(self.memory.layout))
            step.reserved_bytes = meter.reserved_bytes
            records.peaks = meter.peaks_by_pp_rank
