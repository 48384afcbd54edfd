"""Spikes: steps whose loss or gradient norm is finite, but far above that of recent steps.

    limit = median + factor * max(quantile - median, median / 100)

once for the losses and once for the norms of the last `window` finite steps. Spikes count among these steps, so a new
level that stays is a spike only until its share exceeds that above the quantile. Where numbers are almost equal, a
hundredth of the median stands for their difference. All ranks know the same numbers, so they find the same limits
without asking. Checkpoints keep the numbers for a run that is resumed.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from dtlayout.config.sections import SpikesConfig
from dtlayout.training.result import NO_LIMITS, StepLimits, StepResult


class SpikeDetector:
    """Remembers loss and norm of recent steps, and has the limits of the next step."""

    def __init__(self, settings: SpikesConfig):
        self.settings = settings
        self.limits = NO_LIMITS
        """Loss and norm above which the next step is a spike."""
        self.found: list[int] = []
        """Steps since the last start that were spikes."""
        self.num_left_out = 0
        """Steps since the run began that updated nothing."""
        self._losses = deque[float](maxlen=settings.window)
        self._grad_norms = deque[float](maxlen=settings.window)

    @property
    def step_limits(self) -> StepLimits:
        """Limits above which the next step updates nothing; none where spikes are only reported."""
        return self.limits if self.settings.action in ("skip", "save") else NO_LIMITS

    def is_spike(self, result: StepResult) -> bool:
        """Whether the next step, with this result, is a spike."""
        return result.is_finite and result.exceeds(self.limits)

    def keeps_state(self, step: int, result: StepResult) -> bool:
        """Whether the state before a step is to be saved; of spikes in a row only that before the first is."""
        return self.settings.action == "save" and self.is_spike(result) and step - 1 not in self.found

    def add(self, step: int, result: StepResult) -> None:
        """Count a step: the limits are then those of the step after it."""
        if self.is_spike(result):
            self.found.append(step)
        if not result.is_finite or result.exceeds(self.step_limits):
            self.num_left_out += 1
        if result.is_finite and self.settings.action != "off":
            self._losses.append(result.loss)
            self._grad_norms.append(result.grad_norm)
            self._set_limits()

    def to_dict(self) -> dict[str, Any]:
        """The table that a checkpoint keeps for `restore`; JSON gives back each bit of it."""
        return {
            "losses": list(self._losses), "grad_norms": list(self._grad_norms), "num_left_out": self.num_left_out,
        }  # fmt: skip

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from the table of a checkpoint; an older version's is empty, and then no step was seen."""
        self.num_left_out = int(saved.get("num_left_out", 0))
        self._losses.extend(saved.get("losses", ()))
        self._grad_norms.extend(saved.get("grad_norms", ()))
        self._set_limits()

    def _set_limits(self) -> None:
        if self.settings.action != "off" and len(self._losses) >= self.settings.min_steps:
            self.limits = StepLimits(loss=self._limit(self._losses), grad_norm=self._limit(self._grad_norms))

    def _limit(self, recent: Sequence[float]) -> float:
        median, quantile = find_quantile(recent, 0.5), find_quantile(recent, self.settings.quantile)
        return median + self.settings.factor * max(quantile - median, median / 100)


def find_quantile(values: Sequence[float], share: float) -> float:
    """The value at or below which this share of the values lies, without interpolation.

    >>> [find_quantile([5.0, 1.0, 4.0, 2.0, 3.0], share) for share in (0.5, 0.9, 1.0)]
    [3.0, 4.0, 5.0]
    """
    return sorted(values)[int(share * (len(values) - 1))]
