"""Batch: what one optimizer step sees."""

from dataclasses import dataclass

from dtlayout.ranges import ranged, refuse_values


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The sequences of one optimizer step, whatever the layout."""

    global_batch: int = ranged("must be at least 1")
    """Sequences in a step, over all ranks and microbatches."""
    seq_len: int = ranged("must be at least 1")
    """Tokens in a sequence."""

    def __post_init__(self) -> None:
        refuse_values("batch", self)

    @property
    def num_tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.seq_len
