"""Batch: what one optimizer step sees."""

from dataclasses import dataclass

from dtlayout.base.validators import Ranged, ranged

IGNORED = -100
"""Target of a token that the loss does not count."""


@dataclass(frozen=True, kw_only=True)
class Batch(Ranged, section="batch"):
    """The sequences of one optimizer step, whatever the layout."""

    global_batch: int = ranged("must be from 1 to a billion")
    """Sequences in a step, over all ranks and microbatches."""
    seq_len: int = ranged("must be from 1 to a billion")
    """Tokens in a sequence."""

    @property
    def num_tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.seq_len

    def tokens_per_s_per_gpu(self, step_time_s: float, num_gpus: int) -> float:
        """Tokens in a second on each of `num_gpus` GPUs, if a step takes `step_time_s` seconds."""
        return self.num_tokens / step_time_s / num_gpus
