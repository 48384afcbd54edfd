"""Schedule: for each pipeline rank the list of actions that make one step, messages among them. Data, no torch.

A record of `dtlayout.schedules.schedules` orders forwards and backwards, `timing.simulate` times them, and
`_add_messages` adds the sends and receives that connect them. Two stages of one rank need no message.

[Note: one global order of messages]
A send may block until its receive is posted, and a pair of ranks carries its messages in order. So both ends of every
message are placed at one moment of the simulated step, the moment at which its producer ends. Each rank's list is then
the part of one global order of all actions that belongs to that rank. A rank that executes its list from front to back
cannot deadlock, however blocking the messages are: the globally first unfinished action has all inputs that it waits
for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dtlayout.pipelining.timing import simulate
from dtlayout.schedules.actions import COMPUTE, RECEIVE, SEND, Action, Kind, result_of
from dtlayout.schedules.placement import Placement
from dtlayout.schedules.schedules import find_schedule
from dtlayout.spec.batch import Batch
from dtlayout.spec.layout import Layout

SENDS_IN_FLIGHT = 2
"""Messages that a rank may have under way to one neighbour before it waits for the oldest. That bounds the memory that
they hold. The order of messages makes waiting safe: see [Note: one global order of messages]."""


@dataclass(frozen=True)
class Schedule:
    """The actions of every pipeline rank for one step, in the order in which they are executed."""

    name: str
    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    def compute_actions(self, rank: int) -> list[Action]:
        """Forwards and backwards of a rank, without the messages between them."""
        return [a for a in self.ranks[rank] if a.kind in COMPUTE]

    def __str__(self) -> str:
        return "\n".join(f"rank {r}: {' '.join(map(str, self.compute_actions(r)))}" for r in range(len(self.ranks)))


def make_schedule(layout: Layout, batch: Batch) -> Schedule:
    """The schedule of a legal layout."""
    m, placement = layout.num_microbatches(batch), layout.placement
    orders = find_schedule(layout.schedule).orders(placement, m)
    return Schedule(layout.schedule, placement, m, _add_messages(orders, placement))


def _add_messages(orders: Sequence[Sequence[Action]], placement: Placement) -> tuple[tuple[Action, ...], ...]:
    """Actions with both ends of every message at their place, [Note: one global order of messages].

    A backward is taken to last as long as two forwards.
    """
    spans = simulate(orders, placement, lambda action: 2.0 if action.kind is Kind.BACKWARD else 1.0)
    # (time, 0 for a message and 1 for work that starts then, producer): equal on both ends of a message
    timed: list[list[tuple[tuple[float, int, int, int], Action]]] = [[] for _ in orders]
    for span in (span for rank in spans for span in rank):
        action, result = span.action, result_of(span.action)
        timed[span.rank].append(((span.start, 1, action.stage, action.microbatch), action))
        if result is not None and (receiver := placement.receiver_of(result)) is not None:
            key = (span.end, 0, action.stage, action.microbatch)
            send = Action(SEND[result.is_gradient], action.stage, action.microbatch)
            timed[span.rank].append((key, send))
            timed[receiver].append((key, receive_of(send)))
    return tuple(tuple(action for _, action in sorted(rank, key=lambda item: item[0])) for rank in timed)


def receive_of(send: Action) -> Action:
    """The receive that belongs to a send."""
    is_gradient = send.kind is Kind.SEND_BACKWARD
    return Action(RECEIVE[is_gradient], send.stage + (-1 if is_gradient else 1), send.microbatch)
