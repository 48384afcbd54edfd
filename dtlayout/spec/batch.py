"""Batch: what one optimizer step sees, and how batches grow at the begin of a run.

[Note: a ramp]
The size of a global batch is a function of the samples that were seen before it: that of the first stage whose `until`
is more, or the size of the whole batch behind the last one. Steps stay whole, so the last step of a stage may see more
samples than its `until`. So a run goes on at the right size from one saved number, whatever its steps were before.
"""

from collections.abc import Sequence
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


@dataclass(frozen=True, kw_only=True)
class RampStage(Ranged, section="train.batch_ramp"):
    """One of the smaller sizes that global batches have at the begin of a run, one after the other."""

    until: int = ranged("must be at least 1")
    """Samples that a run has seen when its batches leave this size."""
    global_batch: int = ranged("must be from 1 to a billion")
    """Sequences in a step until then, over all ranks and microbatches."""


def size_after(samples: int, global_batch: int, ramp: Sequence[RampStage] = ()) -> int:
    """Sequences of the step that begins after so many samples; `global_batch` where there is no ramp any more.

    >>> size_after(10, 8, [RampStage(until=10, global_batch=2), RampStage(until=18, global_batch=4)])
    4
    """
    return next((stage.global_batch for stage in ramp if samples < stage.until), global_batch)


def count_after(samples: int, num_steps: int, global_batch: int, ramp: Sequence[RampStage] = ()) -> int:
    """Samples that are seen `num_steps` steps later.

    >>> count_after(0, 7, 8, [RampStage(until=10, global_batch=4), RampStage(until=18, global_batch=6)])
    42
    """
    for stage in ramp:
        steps = min(num_steps, max(0, -(-(stage.until - samples) // stage.global_batch)))
        samples, num_steps = samples + steps * stage.global_batch, num_steps - steps
    return samples + num_steps * global_batch


def count_steps_until(end: float, samples: int, global_batch: int, ramp: Sequence[RampStage] = ()) -> int:
    """Fewest steps after which a run that has seen `samples` has seen `end` of them.

    >>> count_steps_until(42, 0, 8, [RampStage(until=10, global_batch=4), RampStage(until=18, global_batch=6)])
    7
    """
    num_steps = 0
    for stage in ramp:
        steps = max(0, -int(-(min(end, stage.until) - samples) // stage.global_batch))
        samples, num_steps = samples + steps * stage.global_batch, num_steps + steps
    return num_steps + max(0, -int(-(end - samples) // global_batch))
