"""Pipeline schedules: the table of all of them, one record each. Whole numbers, no torch.

p pipeline ranks, v virtual stages on each, m microbatches. A schedule of your own is a `PipelineSchedule` that you give
to `register_schedule`. Layouts, search, timing, memory, dry run and runtime then know it by its name.
"""

from math import inf
from typing import Any

from dtlayout.base.errors import InvalidConfig
from dtlayout.schedules.fast_timing import finish_1f1b, finish_gpipe, finish_interleaved_1f1b, hold_rounds, least_1f1b
from dtlayout.schedules.orders import order_1f1b, order_breadth_first, order_interleaved_1f1b
from dtlayout.schedules.placement import VShaped
from dtlayout.schedules.record import PipelineSchedule
from dtlayout.schedules.schedule_file import FILE_PREFIX, read_schedule
from dtlayout.schedules.split_orders import (
    order_dualpipe_v,
    order_interleaved_zb,
    order_v_half,
    order_v_min,
    order_zb_h1,
    order_zb_v,
)

DEFAULT_SCHEDULE = "1f1b"
"""The schedule of layouts that name none, and of layouts without a pipeline."""


def _two_more_than_ranks(p: int, v: int) -> int:
    """Microbatches for all that 1F1B does: p in flight, one more, and the last; one in the middle changes nothing."""
    return p + 2


def _three_rounds(p: int, v: int) -> int:
    """Microbatches of three rounds: after two of them every stage has had a backward, and all are in flight again."""
    return 3 * p


_IN_V: dict[str, Any] = {
    "place": VShaped, "least_virtual_stages": 2, "most_virtual_stages": 2, "least_rounds": 1,
    "enough": _three_rounds, "is_searched": False,
}  # fmt: skip
SCHEDULES: dict[str, PipelineSchedule] = {
    schedule.name: schedule
    for schedule in (
        PipelineSchedule(name="gpipe", order=order_breadth_first, is_breadth_first=True, fast=finish_gpipe),
        PipelineSchedule(
            name="1f1b", order=order_1f1b, least_rounds=1, enough=_two_more_than_ranks, fast=finish_1f1b,
            least=least_1f1b,
        ),
        PipelineSchedule(
            name="interleaved-1f1b", order=order_interleaved_1f1b, least_virtual_stages=2, most_virtual_stages=inf,
            whole_rounds=True, enough=_three_rounds, fast=finish_interleaved_1f1b, in_flight=hold_rounds,
        ),
        PipelineSchedule(
            name="looped-bfs", order=order_breadth_first, least_virtual_stages=2, most_virtual_stages=inf,
            is_breadth_first=True, is_searched=False,
        ),
        PipelineSchedule(
            name="zb-h1", order=order_zb_h1, least_rounds=1, enough=_three_rounds, is_searched=False
        ),
        PipelineSchedule(
            name="interleaved-zb", order=order_interleaved_zb, least_virtual_stages=2, most_virtual_stages=inf,
            whole_rounds=True, enough=_three_rounds, is_searched=False,
        ),
        PipelineSchedule(name="zb-v", order=order_zb_v, **_IN_V),
        PipelineSchedule(name="v-half", order=order_v_half, **_IN_V),
        PipelineSchedule(name="v-min", order=order_v_min, **_IN_V),
        PipelineSchedule(name="dualpipe-v", order=order_dualpipe_v, **_IN_V | {"least_rounds": 2}),
    )
}  # fmt: skip


def register_schedule(schedule: PipelineSchedule) -> None:
    """Make a schedule known to all code in this process; InvalidConfig if its name is taken."""
    if schedule.name in SCHEDULES:
        raise InvalidConfig(f"schedule {schedule.name!r} is registered already; give yours another name")
    SCHEDULES[schedule.name] = schedule


def find_schedule(name: str) -> PipelineSchedule:
    """The schedule of this name, or the one in the file that `name` gives; InvalidConfig names the known ones."""
    if name.startswith(FILE_PREFIX):
        return read_schedule(name.removeprefix(FILE_PREFIX))
    if name not in SCHEDULES:
        raise InvalidConfig(f"schedule={name!r} is unknown; use one of {list(SCHEDULES)} (or {FILE_PREFIX}FILE)")
    return SCHEDULES[name]


def schedule_with(virtual_stages: int) -> str:
    """Name of the schedule for a user who gives only the number of virtual stages."""
    if virtual_stages == 1:
        return DEFAULT_SCHEDULE
    return next(name for name, schedule in SCHEDULES.items() if schedule.takes(2, virtual_stages))
