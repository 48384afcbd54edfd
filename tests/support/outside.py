"""Schedules that are not shipped: stages in a V, and backwards in two parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from dtlayout.schedules import schedules
from dtlayout.schedules.actions import Action, Kind
from dtlayout.schedules.placement import Placement, VShaped
from dtlayout.schedules.schedules import PipelineSchedule, register_schedule


def order_v_gpipe(placement: Placement, rank: int, m: int) -> list[Action]:
    """All forwards down and up the V, then all backwards."""
    stages = placement.stages_of(rank)
    forwards = [Action(Kind.FORWARD, stage, i) for stage in stages for i in range(m)]
    return forwards + [Action(Kind.BACKWARD, stage, i) for stage in reversed(stages) for i in range(m)]


def order_late_weights(placement: Placement, rank: int, m: int) -> list[Action]:
    """1F1B with gradients of weights put off by as many microbatches as there are ranks before (arXiv:2401.10241)."""
    forwards = [Action(Kind.FORWARD, rank, i) for i in range(m)]
    warm_up = min(placement.num_ranks - 1 - rank, m)
    order = forwards[:warm_up]
    for i in range(m):
        order += [*forwards[warm_up + i : warm_up + i + 1], Action(Kind.BACKWARD_INPUT, rank, i)]
        order += [Action(Kind.BACKWARD_WEIGHT, rank, i - rank)] if i >= rank else []
    return order + [Action(Kind.BACKWARD_WEIGHT, rank, i) for i in range(max(0, m - rank), m)]


V_GPIPE = PipelineSchedule(
    name="v-gpipe", order=order_v_gpipe, place=VShaped, least_virtual_stages=2, most_virtual_stages=2,
    is_breadth_first=True,
)  # fmt: skip
LATE_WEIGHTS = PipelineSchedule(name="late-weights", order=order_late_weights, least_rounds=1)


@contextmanager
def registered(*records: PipelineSchedule) -> Iterator[None]:
    """A block in which these schedules are known too."""
    with mock.patch.dict(schedules.SCHEDULES):
        for record in records:
            register_schedule(record)
        yield
