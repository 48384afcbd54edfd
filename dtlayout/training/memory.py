"""Memory of a run: the peak of a step, reported as `peak_memory_bytes`, and the curve of the first steps.

On CUDA the peak is the allocator's over a step, on a CPU the storage tracker's. Only some steps are measured, since the
tracker slows a step, and collecting the peaks of all ranks makes the host wait.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from dtlayout.measure.ledger import UPDATE, Highest
from dtlayout.measure.memory import StatePlace, StorageTracker
from dtlayout.schedules.actions import Action
from dtlayout.spec.layout import Layout


class MemoryMeter:
    """Measures the steps that run inside `watch`, and keeps the largest peak of each pipeline rank."""

    def __init__(
        self,
        device_type: str,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        *,
        state_on: StatePlace = "device",
    ):
        """Count the memory of a device; state elsewhere is left out, also if a CPU is both (`StorageTracker`)."""
        self.device_type = device_type
        tracked = device_type != "cuda"
        self.tracker = StorageTracker(modules, [optimizer], state_on=state_on) if tracked else None
        self.peaks_by_pp_rank: list[int] | None = None
        self.reserved_bytes: int | None = None
        """Most bytes that the allocator of any rank had reserved in the last watched step; None on a CPU."""
        self.curve: list[Highest] = []
        """Curve of all steps inside `watch`: the fullest moment of each action that `mark` named."""
        self._marks: list[Highest] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """A block around a step; `gather_peaks` then gives its peak."""
        self._marks = []
        if self.tracker is None:
            torch.cuda.reset_peak_memory_stats()
            yield
            self._close_mark()
            self.curve += self._marks
        else:
            self.tracker.ledger.forget_peak()
            with self.tracker:
                yield
            self.curve += self.tracker.ledger.highest_by_mark

    def mark(self, action: Action | None) -> None:
        """Inside `watch`, say that an action of the schedule begins, or with None the update after the last one."""
        name = str(action or UPDATE)
        if self.tracker is not None:
            self.tracker.ledger.mark(name)
        else:
            self._close_mark()
            torch.cuda.reset_peak_memory_stats()
            self._marks.append(Highest(name, 0))

    def _close_mark(self) -> None:
        """Note the peak of the action that was marked last; memory before the first mark belongs to none."""
        if self._marks:
            self._marks[-1] = Highest(self._marks[-1].action, torch.cuda.max_memory_allocated())

    def gather_peaks(self, layout: Layout) -> list[int]:
        """The peak of each pipeline rank in the last watched step, bytes: the largest of its ranks.

        Fills `reserved_bytes`. A collective; every rank gets the result.
        """
        if self.tracker is None:
            peak_bytes = max([torch.cuda.max_memory_allocated(), *(mark.nbytes for mark in self._marks)])
            reserved_bytes = torch.cuda.max_memory_reserved()
        else:
            peak_bytes, reserved_bytes = self.tracker.ledger.peak_bytes, 0
        peaks = torch.zeros(2, layout.world_size, dtype=torch.int64, device=self.device_type)
        peaks[0, dist.get_rank()], peaks[1, dist.get_rank()] = peak_bytes, reserved_bytes
        dist.all_reduce(peaks)
        by_pp_rank: list[int] = peaks[0].view(layout.pp, -1).amax(dim=1).tolist()
        self.reserved_bytes = None if self.tracker else int(peaks[1].max())
        known = self.peaks_by_pp_rank or by_pp_rank
        self.peaks_by_pp_rank = [max(pair) for pair in zip(known, by_pp_rank, strict=True)]
        return by_pp_rank

    def gather_curves(self, layout: Layout, group: ProcessGroup | None = None) -> list[list[Highest]]:
        """Curve of each pipeline rank's first rank, on rank 0; a collective of all ranks over `group`."""
        stage_ranks, rank = layout.world_size // layout.pp, dist.get_rank()
        curves: list[list[Highest]] = [[] for _ in range(layout.world_size)] if rank == 0 else []
        dist.gather_object([] if rank % stage_ranks else self.curve, curves or None, dst=0, group=group)
        return curves[::stage_ranks]
