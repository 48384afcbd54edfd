"""Pipeline schedules: one record each, of which everything else reads what it has to know. Whole numbers, no torch.

GPipe arXiv:1811.06965; 1F1B arXiv:2006.09503; interleaved 1F1B arXiv:2104.04473, sec. 2.2. p pipeline ranks, v virtual
stages on each, m microbatches. A schedule of one's own is a `PipelineSchedule` that `register_schedule` has been given:
layouts, search, timing, memory, dry run and runtime then know it by its name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf

from dtlayout.errors import InvalidConfig
from dtlayout.pipelining.actions import Action, Kind
from dtlayout.pipelining.placement import Looped, Placement
from dtlayout.pipelining.waves import (
    Moment,
    StageTimes,
    finish_1f1b,
    finish_gpipe,
    finish_interleaved_1f1b,
    hold_rounds,
)

DEFAULT_SCHEDULE = "1f1b"
"""What a layout has that names none, and one whose pipeline is off."""


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
    whole_rounds: bool = False
    """Whether p must divide the microbatches."""
    enough: Callable[[int, int], int] | None = None
    """From p and v, microbatches that show all that there is: a longer step holds no more and repeats what these do.

    None where more microbatches hold more, or where nobody knows: a long step is then played whole.
    """
    is_breadth_first: bool = False
    """Whether a rank does all microbatches of a stage in a row, so that a longer step only has longer rows."""
    fast: Callable[[int, int, int, StageTimes], list[float]] | None = None
    """p, v, m and the stages' seconds → the end of each rank's last action, without playing them one by one."""
    in_flight: Callable[[int, int, int, int], tuple[Moment, ...]] | None = None
    """p, v, m and a rank → the moments at which it can hold most, likewise."""

    def takes(self, pp: int, virtual_stages: int) -> bool:
        """Whether it goes with so many ranks and virtual stages."""
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
        orders = self.orders(self.place(2, self.least_virtual_stages), 2 * max(1, self.least_rounds))
        return any(action.kind is Kind.BACKWARD_WEIGHT for order in orders for action in order)


def _order_gpipe(placement: Placement, rank: int, m: int) -> list[Action]:
    return [Action(kind, rank, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(m)]


def _order_1f1b(placement: Placement, rank: int, m: int) -> list[Action]:
    forwards = [Action(Kind.FORWARD, rank, i) for i in range(m)]
    backwards = [Action(Kind.BACKWARD, rank, i) for i in range(m)]
    return _alternate(forwards, backwards, warm_up=placement.num_ranks - 1 - rank)


def _order_interleaved_1f1b(placement: Placement, rank: int, m: int) -> list[Action]:
    """Rounds of p microbatches through chunk 0, then chunk 1, …; backward through the chunks the other way round."""
    p, v, stages = placement.num_ranks, placement.virtual_stages, placement.stages_of(rank)

    def nth(kind: Kind, n: int) -> Action:
        chunk = n // p % v
        return Action(kind, stages[chunk if kind is Kind.FORWARD else v - 1 - chunk], n // (p * v) * p + n % p)

    forwards = [nth(Kind.FORWARD, n) for n in range(m * v)]
    backwards = [nth(Kind.BACKWARD, n) for n in range(m * v)]
    return _alternate(forwards, backwards, warm_up=(v - 1) * p + 2 * (p - 1 - rank))


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    steady = len(forwards) - warm_up
    pairs = zip(forwards[warm_up:], backwards[:steady], strict=True)
    return [*forwards[:warm_up], *(action for pair in pairs for action in pair), *backwards[steady:]]


def _two_more_than_ranks(p: int, v: int) -> int:
    """All in flight, one more, and the last: a microbatch in the middle changes nothing."""
    return p + 2


def _three_rounds(p: int, v: int) -> int:
    """After two every stage has had a backward, and all are in flight again."""
    return 3 * p


SCHEDULES: dict[str, PipelineSchedule] = {
    schedule.name: schedule
    for schedule in (
        PipelineSchedule(name="gpipe", order=_order_gpipe, is_breadth_first=True, fast=finish_gpipe),
        PipelineSchedule(
            name="1f1b", order=_order_1f1b, least_rounds=1, enough=_two_more_than_ranks, fast=finish_1f1b
        ),
        PipelineSchedule(
            name="interleaved-1f1b", order=_order_interleaved_1f1b, least_virtual_stages=2, most_virtual_stages=inf,
            whole_rounds=True, enough=_three_rounds, fast=finish_interleaved_1f1b, in_flight=hold_rounds,
        ),
    )
}  # fmt: skip


def register_schedule(schedule: PipelineSchedule) -> None:
    """Make a schedule known to everything in this process; InvalidConfig if its name is taken."""
    if schedule.name in SCHEDULES:
        raise InvalidConfig(f"schedule {schedule.name!r} is registered already; give yours another name")
    SCHEDULES[schedule.name] = schedule


def find_schedule(name: str) -> PipelineSchedule:
    """The schedule of this name; InvalidConfig names the known ones."""
    if name not in SCHEDULES:
        raise InvalidConfig(f"schedule={name!r} is unknown; use one of {list(SCHEDULES)}")
    return SCHEDULES[name]


def schedule_problems(name: str) -> list[str]:
    """A line for a schedule that this package can predict, and not train."""
    if not find_schedule(name).splits_backward:
        return []
    return [f"schedule={name} splits backwards, which can be predicted, not trained; use schedule={DEFAULT_SCHEDULE}"]


def schedule_with(virtual_stages: int) -> str:
    """The name of the schedule for somebody who says no more than how many virtual stages there are."""
    if virtual_stages == 1:
        return DEFAULT_SCHEDULE
    return next(name for name, schedule in SCHEDULES.items() if schedule.takes(2, virtual_stages))
