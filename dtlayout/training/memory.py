"""Peak memory of a run, as `peak_memory_bytes` reports it."""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import nn

from dtlayout.layout import Layout
from dtlayout.measure.memory import StorageTracker


class MemoryMeter:
    """Peak bytes of the steps that are measured: all on CUDA, on CPU those that the storage tracker watches."""

    def __init__(self, device_type: str, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, every: int):
        self.device_type = device_type
        self.every = every
        self.tracker = None if device_type == "cuda" else StorageTracker(modules, [optimizer])
        self.was_watched = False
        self.peaks_by_pp_rank: list[int] | None = None

    def watch_step(self, index: int, *, is_first: bool, instruments: ExitStack) -> None:
        """Measure this step, if its turn has come; on CPU not the first one, which makes the optimizer's state."""
        if self.tracker is None:
            torch.cuda.reset_peak_memory_stats()
            self.was_watched = True
            return
        self.was_watched = not is_first and (self.peaks_by_pp_rank is None or index % self.every == 0)
        if self.was_watched:
            self.tracker.reset_peak()
            instruments.enter_context(self.tracker)

    def gather_peaks(self, layout: Layout) -> list[int] | None:
        """The largest peak of each pipeline rank over its other axes, on every rank; None if nothing was measured."""
        if not self.was_watched:
            return None
        peak_bytes = self.tracker.peak_bytes if self.tracker else torch.cuda.max_memory_allocated()
        peaks = torch.zeros(layout.world_size, dtype=torch.int64, device=self.device_type)
        peaks[dist.get_rank()] = peak_bytes
        dist.all_reduce(peaks)
        by_pp_rank = [int(p) for p in peaks.view(layout.pp, -1).amax(dim=1)]
        old = self.peaks_by_pp_rank or by_pp_rank
        self.peaks_by_pp_rank = [max(pair) for pair in zip(old, by_pp_rank, strict=True)]
        return by_pp_rank
