"""Batches: what this rank reads of each global batch, on its way to the device before the step that needs it."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from dtlayout.data.samples import Rows, Samples, find_starts
from dtlayout.training.transfer import send_to_device


@dataclass(frozen=True)
class OwnBatch:
    """A data-parallel rank's rows of a global batch, [microbatches · B, S] each."""

    tokens: Tensor
    targets: Tensor
    starts: Tensor | None
    """For each token the position at which its document starts, on the CPU; None where documents see each other."""
    wait_s: float = 0.0
    """Seconds for which the host had nothing else to do than to wait for it."""


@dataclass(frozen=True)
class Batches:
    """The batches of a run, as one rank sees them."""

    samples: Samples
    indices: Sequence[int]
    """This rank's of a global batch."""
    device_type: str
    has_documents: bool
    """Whether documents of a sample are kept apart."""

    def fetch(self, step: int) -> OwnBatch:
        """The batch of a step; the host reads it and does not wait for the device."""
        return self._send(self._read(step))

    def fetch_ahead(self, steps: range) -> Iterator[OwnBatch]:
        """The batches of steps in their order; a thread reads the next one while whoever has this one works."""
        if not steps:
            return
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as reader:
            following = reader.submit(self._read, steps.start)
            for step in steps:
                started = time.perf_counter()
                rows = following.result()
                wait_s = time.perf_counter() - started
                if step + 1 < steps.stop:
                    following = reader.submit(self._read, step + 1)
                yield self._send(rows, wait_s)

    def _read(self, step: int) -> tuple[Rows, Tensor | None]:
        rows = self.samples.batch(step, self.indices)
        return rows, find_starts(rows.is_last) if self.has_documents else None

    def _send(self, read: tuple[Rows, Tensor | None], wait_s: float = 0.0) -> OwnBatch:
        rows, starts = read
        tokens, targets = (send_to_device(each, self.device_type) for each in (rows.tokens, rows.targets))
        return OwnBatch(tokens, targets, starts, wait_s)
