"""StepResult: the numbers that every rank knows after a step, and the limits above which a step updates nothing."""

import math
from dataclasses import dataclass

from dtlayout.training.routing import Routing


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """Largest loss and gradient norm of a step that still updates the model; infinity for no limit."""

    loss: float
    grad_norm: float


NO_LIMITS = StepLimits(loss=math.inf, grad_norm=math.inf)


@dataclass(frozen=True)
class StepResult:
    """Loss and gradient norm of a step, and whether to stop after it; equal on every rank."""

    loss: float
    """Sum over valid tokens of the global batch divided by their number, nats."""
    grad_norm: float
    """Norm of all gradients before clipping."""
    stop_requested: bool
    """Whether any rank asked to stop."""
    loss_scale: float | None = None
    """Factor of the loss in backward; None where it is not scaled."""
    routing: Routing | None = None
    """Choices of the routers in the step, in a model with experts."""

    @property
    def is_finite(self) -> bool:
        """False if loss or norm is NaN or infinite; the step has updated nothing then."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def overflows(self) -> bool:
        """Whether gradients are not finite because the loss's factor, which may still fall, is too large for them."""
        scale = self.loss_scale
        return scale is not None and scale > 1 and math.isfinite(self.loss) and not math.isfinite(self.grad_norm)

    def exceeds(self, limits: StepLimits) -> bool:
        """Whether loss or norm is above its limit; a step that was given the limits has updated nothing then."""
        return self.loss > limits.loss or self.grad_norm > limits.grad_norm
