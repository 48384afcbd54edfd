"""The record of a pipeline schedule, from which all other code reads its properties. Whole numbers, no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from dtlayout.schedules.actions import Action, Kind
from dtlayout.schedules.fast_timing import Moment, StageTimes
from dtlayout.schedules.placement import Looped, Placement


@dataclass(frozen=True, eq=False, kw_only=True)
class PipelineSchedule:
    """A pipeline schedule: its order of actions, the layouts that it allows, and formulas that are known for it."""

    name: str
    """The value of `layout.schedule`."""
    order: Callable[[Placement, int, int], list[Action]]
    """The forwards and backwards of a rank in their order, from the placement, the rank and m."""
    place: Callable[[int, int], Placement] = Looped
    """The placement of stages, from p and v."""
    least_virtual_stages: int = 1
    """Smallest number of stages on a rank; above 1, the schedule needs p > 1 too."""
    most_virtual_stages: float = 1
    """Largest number of stages on a rank; `math.inf` for no limit."""
    least_rounds: int = 0
    """Smallest number of microbatches, in multiples of p."""
    num_ranks: int | None = None
    """The only p that the schedule is written for; None for any."""
    num_microbatches: int | None = None
    """The only m that the schedule is written for; None for any."""
    whole_rounds: bool = False
    """Whether m must be a multiple of p."""
    enough: Callable[[int, int], int] | None = None
    """From p and v, the m from which on longer steps hold no more and only repeat actions.

    None where more microbatches hold more, or where nobody knows it: a long step is then played whole.
    """
    is_breadth_first: bool = False
    """Whether a rank does all microbatches of a stage in a row, so that a longer step only has longer rows."""
    is_searched: bool = True
    """Whether a search tries it where the user names no schedule. False for slow ones, whose actions must be played."""
    fast: Callable[[int, int, int, StageTimes], list[float]] | None = None
    """From p, v, m and the stages' seconds, the end of each rank's last action, without playing single actions."""
    least: Callable[[int, StageTimes], float] | None = None
    """From m and the stages' seconds, a lower bound of the step's seconds: one above the bound for all schedules."""
    in_flight: Callable[[int, int, int, int, bool], tuple[Moment, ...]] | None = None
    """From p, v, m, a rank and `with_gradients`, the moments of `timing.in_flight_peaks`, without playing actions."""

    def takes(self, pp: int, virtual_stages: int) -> bool:
        """Whether the schedule allows `pp` ranks with `virtual_stages` stages each."""
        if self.num_ranks not in (None, pp):
            return False
        needs_pipeline = self.least_virtual_stages > 1
        return self.least_virtual_stages <= virtual_stages <= self.most_virtual_stages and pp > needs_pipeline

    def orders(self, placement: Placement, num_microbatches: int) -> list[list[Action]]:
        """For each rank its forwards and backwards in their order."""
        return [self.order(placement, rank, num_microbatches) for rank in range(placement.num_ranks)]

    def shorten(self, p: int, v: int, m: int) -> int:
        """Microbatches of the shortest step that holds as much as one of m microbatches, and repeats nothing."""
        return min(m, self.enough(p, v)) if self.enough else m

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights come apart from those of inputs."""
        m = self.num_microbatches or 2 * max(1, self.least_rounds)
        orders = self.orders(self.place(self.num_ranks or 2, self.least_virtual_stages), m)
        return any(action.kind is Kind.BACKWARD_WEIGHT for order in orders for action in order)
