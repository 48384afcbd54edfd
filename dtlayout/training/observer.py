"""Observer: whatever watches a run while it trains has this one interface; `register_observer` adds one from outside.

A run calls its observers in this order in each step:

    around_launch   the host gives the device forward, backward and update; before_action before each action of it
    on_result       loss and norm are there; the device may still work on the update
    pauses          if one observer says so, or the run ends here, the host waits for the update
    after_step      everything else: validation, metrics, checkpoints

and `at_end` once, after the last step. Observers are told one after the other: those of dtlayout in the order of
`make_observers` (observers/order.py), then the registered ones. An `ObservedStep` is filled in on the way, so that
later ones read what earlier ones found. No torch here: a plugin imports this wherever dtlayout is imported.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from dtlayout.base.errors import EXIT_NON_FINITE, InvalidConfig
from dtlayout.schedules.actions import Action
from dtlayout.spec.batch import Batch
from dtlayout.training.result import StepResult

OBSERVERS: dict[str, str] = {}
"""Name of each registered observer → its class as "module:name"; called with an `ObservedRun` (observers/order.py)."""


@dataclass(kw_only=True)
class ObservedStep:
    """A step whose loss is known, with what observers have found out about it so far."""

    number: int
    """Optimizer steps done since the run began, this one included."""
    result: StepResult
    lr: float
    """Learning rate of this step."""
    tokens: int
    """Tokens that the run has seen until now."""
    batch: Batch
    """Size of this step, which a ramp may make smaller than that of the config."""
    data_wait_s: float
    """Seconds that this rank waited for the step's batch."""
    exit_code: int | None
    """The exit code if the run ends with this step; None if it goes on."""
    is_spike: bool = False
    """Whether loss or norm is far above those of recent steps; known in `after_step`."""
    time_s: float = 0.0
    """Seconds of the step as metrics.jsonl counts them; known in `after_step`."""
    validation_loss: float | None = None
    """Nats a token of [validation]; None where this step was not followed by one."""
    validation_losses: dict[str, float] | None = None
    """Nats a token of each named set of [validation]; None without any, or where this step was not followed by one."""
    peak_bytes: int | None = None
    """Largest peak of memory of all ranks; None where it was not measured."""

    reserved_bytes: int | None = None
    """Most bytes that the allocator of any rank had reserved; None where that was not measured, as on a CPU."""

    @property
    def is_over(self) -> bool:
        """Whether the run ends with this step."""
        return self.exit_code is not None

    @property
    def num_done(self) -> int:
        """Steps that the run has done, this one included unless the run ends because it was not finite."""
        return self.number - 1 if self.exit_code == EXIT_NON_FINITE else self.number


class Observer:
    """Watches a run. Each method does nothing here; a subclass overrides the moments that it needs.

    All ranks call all methods in the same order, so a collective is allowed in each but `before_action` and `pauses`.
    Gradients are there in `before_action(None)` alone, after the last backward: the launch goes on with the update and
    frees them. An exception ends the run.
    """

    def at_start(self) -> None:
        """Called once before the first launch."""

    def around_launch(self, number: int) -> AbstractContextManager[object]:
        """A block around the launch of a step, by its number from 1."""
        return nullcontext()

    def before_action(self, action: Action | None) -> None:
        """Called before each action of the schedule that this rank launches, and with None after the last of a step."""

    def on_result(self, step: ObservedStep) -> None:
        """Called when loss and norm have come, while the device may still update; also for a step without an update."""

    def pauses(self, step: ObservedStep) -> bool:
        """Whether `after_step` needs the finished update, or takes long: its time then counts for no step."""
        return False

    def after_step(self, step: ObservedStep) -> None:
        """Called after each step, also after one that was not finite, and before the next launch."""

    def at_end(self, exit_code: int, done: int) -> None:
        """Called once after the last step, `done` steps since the run began; not if the run ends by an exception."""


def register_observer(name: str, place: str) -> None:
    """Add an observer to every run of this process: `place` is its class as "module:name", imported when a run begins.

    InvalidConfig if the name is taken.
    """
    if name in OBSERVERS:
        raise InvalidConfig(f"the observer {name!r} is there already; give yours another name")
    OBSERVERS[name] = place
