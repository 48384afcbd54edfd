"""Observer: records which kernels the first step runs, and refuses another attention kernel than was asked for."""

import os
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from dtlayout.base.errors import KernelError
from dtlayout.measure.kernels import KernelRecorder
from dtlayout.pipelining.runtime import Runtime
from dtlayout.training.kernels import find_other_attention, first_forward
from dtlayout.training.observer import ObservedStep, Observer
from dtlayout.training.records import Records


class KernelObserver(Observer):
    """Watches the first forward of a start, on one rank of each node."""

    def __init__(self, runtime: Runtime, attention: str, records: Records, group: dist.ProcessGroup, first: int):
        """`attention` is the kernel that was asked for, `first` the number of the first step.

        Ranks agree over `group`.
        """
        self.runtime, self.attention, self.records, self.group, self.first = runtime, attention, records, group, first
        self.recorder = KernelRecorder()

    def around_launch(self, number: int) -> AbstractContextManager[object]:
        is_recorded = number == self.first and os.environ.get("LOCAL_RANK", "0") == "0"
        return first_forward(self.runtime, self.recorder) if is_recorded else nullcontext()

    def on_result(self, step: ObservedStep) -> None:
        """KernelError on every rank if a recorded rank ran another attention kernel than was asked for."""
        if step.number != self.first:
            return
        problem = find_other_attention(self.attention, set(self.recorder.executed["attention"]))
        problems = torch.tensor(int(bool(problem)))
        dist.all_reduce(problems, group=self.group)
        if problems:
            raise KernelError(problem or f"kernels.attention={self.attention!r} did not run on another rank")

    def at_end(self, exit_code: int, done: int) -> None:
        self.records.executed = self.recorder.executed
