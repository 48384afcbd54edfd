"""Batches: what this rank reads of each global batch, on its way to the device before the step that needs it."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from dtlayout.data.samples import Samples, find_starts
from dtlayout.mesh.axes import CP, coordinate, own_positions
from dtlayout.ops.documents import share_positions
from dtlayout.spec.layout import Layout
from dtlayout.training.transfer import send_to_device


@dataclass(frozen=True)
class OwnBatch:
    """A data-parallel rank's rows of a global batch, [microbatches · B, s] each: of every sample the rank's tokens."""

    tokens: Tensor
    targets: Tensor
    starts: Tensor | None
    """For each token of whole samples, [microbatches · B, S], the position at which its document starts, on the CPU;
    None where documents see each other."""
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
    layout: Layout
    rank: int
    """Which decide which tokens of each sample are this rank's."""

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

    def _read(self, step: int) -> OwnBatch:
        rows = self.samples.batch(step, self.indices)
        starts = find_starts(rows.is_last) if self.has_documents else None
        tokens, targets = take_own((rows.tokens, rows.targets), starts, self.layout, self.rank)
        return OwnBatch(tokens, targets, starts)

    def _send(self, read: OwnBatch, wait_s: float = 0.0) -> OwnBatch:
        tokens, targets = (send_to_device(each, self.device_type) for each in (read.tokens, read.targets))
        return OwnBatch(tokens, targets, read.starts, wait_s)


def take_own(rows: Sequence[Tensor], starts_BS: Tensor | None, layout: Layout, rank: int) -> list[Tensor]:
    """Of each of `rows`, [microbatches · B, S], the tokens that are this rank's, [microbatches · B, s].

    Targets stay with the token that they follow. Where `starts_BS` keeps documents apart they decide it, for each
    microbatch anew.
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
