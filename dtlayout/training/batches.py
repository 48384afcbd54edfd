"""Batches: what this rank reads of each global batch, on its way to the device before the step that needs it."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dtlayout.data.samples import Samples, find_starts
from dtlayout.training.transfer import send_to_device


@dataclass(frozen=True)
class OwnBatch:
    """A data-parallel rank's rows of a global batch, [microbatches · B, S] each."""

    tokens: Tensor
    targets: Tensor
    starts: Tensor | None
    """For each token the position at which its document starts, on the CPU; None where documents see each other."""


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
        tokens, targets = self.samples.batch(step, self.indices)
        starts = find_starts(tokens, self.samples.tokens.end_of_document) if self.has_documents else None
        return OwnBatch(send_to_device(tokens, self.device_type), send_to_device(targets, self.device_type), starts)
