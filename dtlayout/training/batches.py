"""Batches: this rank's part of each global batch, read ahead by a thread and sent to the device before its step."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from dtlayout.data.samples import Samples, find_starts, own_indices
from dtlayout.mesh.axes import CP, coordinate, dp_rank, own_positions
from dtlayout.ops.documents import share_positions
from dtlayout.spec.layout import Layout
from dtlayout.training.transfer import send_to_device


@dataclass(frozen=True)
class OwnBatch:
    """This rank's part of a global batch: the rows of its data-parallel rank, and of each row its own tokens."""

    tokens: Tensor
    """[microbatches · B, s]."""
    targets: Tensor
    """[microbatches · B, s]."""
    starts: Tensor | None
    """Position at which the document of each token starts, for whole samples, [microbatches · B, S], on the CPU; None
    where documents see each other."""
    wait_s: float = 0.0
    """Seconds that the host did nothing but wait for this batch."""


@dataclass(frozen=True)
class Batches:
    """The batches of a run, as one rank sees them."""

    samples: Samples
    device_type: str
    has_documents: bool
    """Whether documents of a sample are kept apart."""
    layout: Layout
    """Decides, with `rank`, which samples of a global batch are this rank's, and which tokens of each."""
    rank: int

    def fetch(self, step: int) -> OwnBatch:
        """Read the batch of a step, which counts from 0, and send it without waiting for the device."""
        return self._send(self._read(step))

    def fetch_ahead(self, steps: range) -> Iterator[OwnBatch]:
        """Batches of these steps, which count from 0, in order; a thread reads the next one while this one is used."""
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

    def _read(self, step: int) -> OwnBatch:
        indices = own_indices(self.samples.size_of(step), dp_rank(self.rank, self.layout), self.layout.dp)
        rows = self.samples.batch(step, indices)
        starts = find_starts(rows.is_last) if self.has_documents else None
        tokens, targets = take_own((rows.tokens, rows.targets), starts, self.layout, self.rank)
        return OwnBatch(tokens, targets, starts)

    def _send(self, read: OwnBatch, wait_s: float = 0.0) -> OwnBatch:
        tokens, targets = (send_to_device(each, self.device_type) for each in (read.tokens, read.targets))
        return OwnBatch(tokens, targets, read.starts, wait_s)


def take_own(rows: Sequence[Tensor], starts_BS: Tensor | None, layout: Layout, rank: int) -> list[Tensor]:
    """Take this rank's tokens, [microbatches · B, s], out of each of `rows`, [microbatches · B, S].

    Targets stay with the token that they follow. Where documents are kept apart, `starts_BS` decides which tokens are
    this rank's, for each microbatch anew.
    """
    if starts_BS is None or not layout.attends_in_parts:
        positions = own_positions(rank, layout, rows[0].shape[1])
        return [_take_parts(x, positions) for x in rows]
    place = coordinate(rank, layout)[CP]
    own = [share_positions(starts, layout.cp)[place] for starts in starts_BS.split(layout.micro_batch)]
    return [torch.cat([x[:, i] for x, i in zip(x.split(layout.micro_batch), own, strict=True)]) for x in rows]


def _take_parts(x_BS: Tensor, positions: Sequence[range]) -> Tensor:
    parts = [x_BS[:, part.start : part.stop] for part in positions]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
