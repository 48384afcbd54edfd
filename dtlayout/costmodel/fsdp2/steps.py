"""A rank's actions as steps of its stages, for the memory of FSDP2: each knows facts about the steps around it.

Steps that follow each other and are alike are one row, so that long steps of a schedule cost no more than short ones.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, repeat, starmap
from typing import NamedTuple

from dtlayout.pipelining.schedule import SENDS_IN_FLIGHT
from dtlayout.schedules.actions import COMPUTE, RELEASE, Action, Kind, result_of
from dtlayout.schedules.placement import Placement
from dtlayout.schedules.record import PipelineSchedule


class Reduced(NamedTuple):
    """A backward that has reduced a stage's units."""

    chunk: int
    """Place of the stage among the rank's stages."""
    kind: Kind
    """Whether it was a whole one, or the second part of one."""
    kind_changed: bool
    """`Step.kind_changed`: embedding and head had gradients to reduce in a second part."""


class Step(NamedTuple):
    """One action of a rank."""

    chunk: int
    """Place of the stage among the rank's stages."""
    kind: Kind
    is_first: bool
    """Whether it is the stage's first of its kind."""
    is_last: bool
    """Whether it is the stage's last."""
    follows_forward: bool
    """Whether the stage's last action was a forward, after which norm and head are still gathered."""
    kind_changed: bool
    """Whether the stage's last backward, or part of one, was of another kind, or there was none before."""
    reduced: Reduced | None
    """The rank's last backward that reduced, if this step reduces too and the last unit's buffer is still there."""
    beside_own_pass: bool = False
    """Whether a forward's own backward is the rank's next action, or a backward's own forward was its last one. False,
    as the fields below are, unless activations go to the host."""
    prev_block_still_copying: bool = False
    """Whether the rank's last action was a forward whose last block is still being copied to the host."""
    prefetches_next: bool = False
    """Whether the rank's next action is a backward whose first block comes back from the host meanwhile."""


_BEGUN_WITH = {
    Kind.BACKWARD: (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT),
    Kind.BACKWARD_WEIGHT: (Kind.BACKWARD, Kind.BACKWARD_WEIGHT),
}
"""Kind of an action → kinds that have begun for a stage once it is done; default: itself alone."""
StepRow = tuple[Step | None, int]
"""A step and how often it is done in a row; None is a message that has not gone."""
_PLAYED_IN_ROWS = 4
"""Microbatches of a breadth-first step: two whose messages have not gone, one in the middle, and the last."""


def find_steps(
    schedule: PipelineSchedule, placement: Placement, m: int, rank: int, *, offloads: bool
) -> Iterator[tuple[Action, Step, bool]]:
    """`follow_steps` of a rank's forwards and backwards of m microbatches."""
    return follow_steps(list(schedule.order(placement, rank, m)), placement, offloads=offloads)


def follow_steps(
    actions: Sequence[Action], placement: Placement, *, offloads: bool
) -> Iterator[tuple[Action, Step, bool]]:
    """A rank's forwards and backwards as steps of its stages, and whether each leaves a message that has not gone.

    The first messages to each neighbour have not gone.
    """
    neighbours: Iterable[Iterable[bool]] = repeat(())
    if offloads:
        neighbours = starmap(_look_around, zip([None, *actions], actions, [*actions[1:], None], strict=False))
    last = {action.stage: action for action in actions if action.kind in RELEASE}
    begun: dict[Kind, set[int]] = {kind: set() for kind in COMPUTE}
    forwarded: set[int] = set()
    reduced: Reduced | None = None
    last_kind: dict[int, Kind] = {}
    num_sent = Counter[int | None]()
    known = dict[tuple[Kind, int], tuple[int, int | None]]()
    for action, neighbour in zip(actions, neighbours, strict=False):
        kind, stage, _ = action
        if (of_stage := (kind, stage)) not in known:  # the same for all of its microbatches
            receiver = None if (result := result_of(action)) is None else placement.receiver_of(result)
            known[of_stage] = placement.chunk_of(stage), receiver
        chunk, receiver = known[of_stage]
        is_first, is_last = chunk not in begun[kind], action == last.get(stage)
        kind_changed = last_kind.get(chunk) is not kind
        reduces = kind in RELEASE
        before = reduced if reduces else None
        yield (
            action,
            Step(chunk, kind, is_first, is_last, chunk in forwarded, kind_changed, before, *neighbour),
            receiver is not None and num_sent[receiver] < SENDS_IN_FLIGHT,
        )
        num_sent[receiver] += 1
        if reduces:
            reduced = None if is_last else Reduced(chunk, kind, kind_changed)
        if kind is Kind.FORWARD:
            forwarded.add(chunk)
        else:
            forwarded.discard(chunk)
            last_kind[chunk] = kind
        for alike in _BEGUN_WITH.get(kind, (kind,)):
            begun[alike].add(chunk)


def _look_around(before: Action | None, action: Action, after: Action | None) -> tuple[bool, bool, bool]:
    """The last three fields of a `Step` between two others, for a rank whose activations go to the host."""
    follows_own = before is not None and before.kind is Kind.FORWARD and before[1:] == action[1:]
    precedes_own = after is not None and action.kind is Kind.FORWARD and _is_backward_of(action, after)
    prev_block_still_copying = before is not None and before.kind is Kind.FORWARD and not follows_own
    prefetches_next = after is not None and after.kind is not Kind.FORWARD and not precedes_own
    return precedes_own or follows_own, prev_block_still_copying, prefetches_next


def _is_backward_of(forward: Action, action: Action) -> bool:
    """Whether an action is the backward of a forward."""
    return action.kind is not Kind.FORWARD and action[1:] == forward[1:]


@lru_cache(maxsize=256)
def find_rows(
    schedule: PipelineSchedule, placement: Placement, m: int, rank: int, offloads: bool
) -> tuple[list[StepRow], list[int]]:
    """The different rows of steps of a rank, and their order by place."""
    shorter = min(m, _PLAYED_IN_ROWS) if schedule.is_breadth_first else m
    played = find_steps(schedule, placement, shorter, rank, offloads=offloads)
    steps = (each for _, step, leaves_message in played for each in ((step, None) if leaves_message else (step,)))
    rows: list[StepRow] = [(step, len(list(run))) for step, run in groupby(steps)]
    if schedule.is_breadth_first and offloads:  # the last forward of a row is like the others
        rows = [(s._replace(prefetches_next=False) if s and s.kind is Kind.FORWARD else s, n) for s, n in rows]
    if schedule.is_breadth_first:  # of each chunk and kind the last row is that of the microbatches in the middle
        middle = {
            (step.chunk, step.kind): place
            for place, (step, _) in enumerate(rows)
            if step and not step.is_first and not step.is_last
        }
        for place in middle.values():
            step, count = rows[place]
            rows[place] = (step, count + m - shorter)
    places = {row: place for place, row in enumerate(dict.fromkeys(rows))}
    return list(places), [places[row] for row in rows]
