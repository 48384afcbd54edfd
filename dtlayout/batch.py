"""Batch: what one optimizer step sees."""

from dataclasses import dataclass

from dtlayout.errors import InvalidConfig


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The sequences of one optimizer step, whatever the layout."""

    global_batch: int
    """Sequences in a step, over all ranks and microbatches."""
    seq_len: int
    """Tokens in a sequence."""

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)} must be at least 1"
            for name in ("global_batch", "seq_len")
            if getattr(self, name) < 1
        ]
        if problems:
            raise InvalidConfig([f"batch.{problem}" for problem in problems])

    @property
    def num_tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.seq_len
