"""Peak memory of a run, as `peak_memory_bytes` reports it.

On CUDA it is the allocator's peak over a step, on CPU what the storage tracker counts over one. Either way only some
steps report: the tracker slows a step, and collecting the peaks of all ranks makes the host wait.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from dtlayout.layout import Layout
from dtlayout.measure.memory import StorageTracker


class MemoryMeter:
    """Measures the steps that it is asked to, and keeps the largest peak of each pipeline rank."""

    def __init__(self, device_type: str, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer):
        self.device_type = device_type
        self.tracker = None if device_type == "cuda" else StorageTracker(modules, [optimizer])
        self.peaks_by_pp_rank: list[int] | None = None

    def watch(self) -> AbstractContextManager[object]:
        """A block around a step that `gather_peaks` will be called for."""
        if self.tracker is None:
            torch.cuda.reset_peak_memory_stats()
            return nullcontext()
        self.tracker.reset_peak()
        return self.tracker

    def gather_peaks(self, layout: Layout) -> list[int]:
        """The peak of each pipeline rank, the largest over its other axes; a collective, every rank gets the result."""
        peaks = torch.zeros(layout.world_size, dtype=torch.int64, device=self.device_type)
        peaks[dist.get_rank()] = self.tracker.peak_bytes if self.tracker else torch.cuda.max_memory_allocated()
        dist.all_reduce(peaks)
        by_pp_rank: list[int] = peaks.view(layout.pp, -1).amax(dim=1).tolist()
        known = self.peaks_by_pp_rank or by_pp_rank
        self.peaks_by_pp_rank = [max(pair) for pair in zip(known, by_pp_rank, strict=True)]
        return by_pp_rank
