"""What a pipeline schedule is: a record of which everything else reads what it has to know. Whole numbers, no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from dtlayout.schedules.actions import Action, Kind
from dtlayout.schedules.fast_timing import Moment, StageTimes
from dtlayout.schedules.placement import Looped, Placement


@dataclass(frozen=True, eq=False, kw_only=True)
class PipelineSchedule:
    """What a schedule is, when it is legal, how it goes on in long steps, and what is known of it in closed form."""

    name: str
    """The value of `layout.schedule`."""
    order: Callable[[Placement, int, int], list[Action]]
    """Forwards and backwards of a rank in their order, from the placement, the rank and m."""
    place: Callable[[int, int], Placement] = Looped
    """Where stages lie, from p and v."""
    least_virtual_stages: int = 1
    """Stages on a rank that it needs at least; above 1, it needs p > 1 too."""
    most_virtual_stages: float = 1
    """Stages on a rank that it can have at most; `math.inf` for any number."""
    least_rounds: int = 0
    """Microbatches that it needs at least, for each of p ranks."""
    num_ranks: int | None = None
    """The p that it is written for; None for any."""
    num_microbatches: int | None = None
    """The m that it is written for; None for any."""
    whole_rounds: bool = False
    """Whether p must divide the microbatches."""
    enough: Callable[[int, int], int] | None = None
    """From p and v, microbatches that show all that there is: a longer step holds no more and repeats what these do.

    None where more microbatches hold more, or where nobody knows: a long step is then played whole.
    """
    is_breadth_first: bool = False
    """Whether a rank does all microbatches of a stage in a row, so that a longer step only has longer rows."""
    is_searched: bool = True
    """Whether a search tries it where the user names none: one whose actions have to be played is a slow one."""
    fast: Callable[[int, int, int, StageTimes], list[float]] | None = None
    """p, v, m and the stages' seconds → the end of each rank's last action, without playing them one by one."""
    least: Callable[[int, StageTimes], float] | None = None
    """m and the stages' seconds → what a step takes at least, by more waits than the one for the first microbatch."""
    in_flight: Callable[[int, int, int, int, bool], tuple[Moment, ...]] | None = None
    """p, v, m, a rank and whether all gradients are to be there → the moments at which it can hold most, likewise."""

    def takes(self, pp: int, virtual_stages: int) -> bool:
        """Whether it goes with so many ranks and virtual stages."""
        if self.num_ranks not in (None, pp):
            return False
        needs_pipeline = self.least_virtual_stages > 1
        return self.least_virtual_stages <= virtual_stages <= self.most_virtual_stages and pp > needs_pipeline

    def orders(self, placement: Placement, num_microbatches: int) -> list[list[Action]]:
        """For each rank its forwards and backwards in their order."""
        return [self.order(placement, rank, num_microbatches) for rank in range(placement.num_ranks)]

    def shorten(self, p: int, v: int, m: int) -> int:
        """Microbatches of the shortest step that holds as much as one of m, and repeats nothing."""
        return min(m, self.enough(p, v)) if self.enough else m

    @cached_property
    def splits_backward(self) -> bool:
        """Whether gradients of weights come apart from those of inputs."""
        m = self.num_microbatches or 2 * max(1, self.least_rounds)
        orders = self.orders(self.place(self.num_ranks or 2, self.least_virtual_stages), m)
        return any(action.kind is Kind.BACKWARD_WEIGHT for order in orders for action in order)
