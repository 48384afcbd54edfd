"""Schedule: for each pipeline rank the list of actions that make one step. Data, no torch.

p pipeline ranks, v virtual stages on each, m microbatches, n = p·v stages; stage s lives on rank s mod p.
`make_schedule` orders forwards and backwards (GPipe arXiv:1811.06965; 1F1B arXiv:2006.09503; interleaved 1F1B
arXiv:2104.04473, sec. 2.2); `simulate` times them; `_add_messages` adds the sends and receives that connect them.

[Note: one global order of messages]
A send may block until its receive is posted, and one pair of ranks carries its messages in order. So both ends of every
message are placed at one moment of the simulated step, the moment at which its producer ends, and each rank's list is
what one global order of all actions leaves for that rank. Whoever executes the list from front to back, however
blocking the messages are, cannot deadlock: the globally first unfinished action has all it waits for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from dtlayout.batch import Batch
from dtlayout.layout import Layout


class Kind(Enum):
    """What an action does, for one stage and one microbatch."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does. A message carries the name of the stage that sends or receives it."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Span:
    """When a rank works on an action, in the unit of the durations that were simulated."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """The actions of every pipeline rank for one step, in the order in which they are executed."""

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> range:
        """The stages that a pipeline rank holds, first to last."""
        return range(rank, self.num_stages, self.num_ranks)

    def compute_actions(self, rank: int) -> list[Action]:
        """Forwards and backwards of a rank, without the messages between them."""
        return [a for a in self.ranks[rank] if a.kind in (Kind.FORWARD, Kind.BACKWARD)]

    def __str__(self) -> str:
        rows = (f"rank {r}: " + " ".join(map(str, self.compute_actions(r))) for r in range(self.num_ranks))
        return "\n".join(rows)


def make_schedule(layout: Layout, batch: Batch) -> Schedule:
    """The schedule of a legal layout."""
    p, v, m = layout.pp, layout.virtual_stages, layout.num_microbatches(batch)
    orders = make_orders(layout.schedule, p, v, m)
    return Schedule(
        name=layout.schedule, num_ranks=p, num_stages=p * v, num_microbatches=m, ranks=_add_messages(orders, p * v)
    )


def make_orders(schedule: str, p: int, v: int, m: int) -> list[list[Action]]:
    """For each pipeline rank its forwards and backwards in order; m may be fewer than the ranks under 1F1B."""
    return [make_order(schedule, rank, p, v, m) for rank in range(p)]


def make_order(schedule: str, rank: int, p: int, v: int, m: int) -> list[Action]:
    """The same of one rank."""
    return _ORDERS[schedule](rank, p, v, m)


def simulate(
    orders: Sequence[Sequence[Action]], num_stages: int, duration: Callable[[Action], float]
) -> list[list[Span]]:
    """When each rank works on each of its forwards and backwards, messages taking no time.

    A rank does its actions in order; a forward waits for the stage before, a backward for the stage after.
    """
    num_ranks = len(orders)
    end_of: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    free = [0.0] * num_ranks
    runnable = list(range(num_ranks))
    while runnable:
        rank = runnable.pop()
        while len(spans[rank]) < len(orders[rank]):
            action = orders[rank][len(spans[rank])]
            needed = input_of(action, num_stages)
            if needed is not None and needed not in end_of:
                break
            start = max(free[rank], end_of[needed] if needed else 0.0)
            end_of[action] = free[rank] = start + duration(action)
            spans[rank].append(Span(rank, action, start, free[rank]))
            consumer = _consumer_of(action, num_stages)
            if consumer is not None and consumer.stage % num_ranks != rank:
                runnable.append(consumer.stage % num_ranks)
    assert all(len(s) == len(o) for s, o in zip(spans, orders, strict=True)), "an order waits for itself"
    return spans


def _order_gpipe(rank: int, p: int, v: int, m: int) -> list[Action]:
    return [Action(kind, rank, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(m)]


def _order_1f1b(rank: int, p: int, v: int, m: int) -> list[Action]:
    forwards = [Action(Kind.FORWARD, rank, i) for i in range(m)]
    backwards = [Action(Kind.BACKWARD, rank, i) for i in range(m)]
    return _alternate(forwards, backwards, warm_up=p - 1 - rank)


def _order_interleaved_1f1b(rank: int, p: int, v: int, m: int) -> list[Action]:
    """Rounds of p microbatches through chunk 0, then chunk 1, …; backward through the chunks the other way round."""

    def nth(kind: Kind, n: int) -> Action:
        chunk = n // p % v
        if kind is Kind.BACKWARD:
            chunk = v - 1 - chunk
        return Action(kind, chunk * p + rank, n // (p * v) * p + n % p)

    forwards = [nth(Kind.FORWARD, n) for n in range(m * v)]
    backwards = [nth(Kind.BACKWARD, n) for n in range(m * v)]
    return _alternate(forwards, backwards, warm_up=(v - 1) * p + 2 * (p - 1 - rank))


_ORDERS = {"gpipe": _order_gpipe, "1f1b": _order_1f1b, "interleaved-1f1b": _order_interleaved_1f1b}


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    steady = len(forwards) - warm_up
    pairs = zip(forwards[warm_up:], backwards[:steady], strict=True)
    return [*forwards[:warm_up], *(action for pair in pairs for action in pair), *backwards[steady:]]


def input_of(action: Action, num_stages: int) -> Action | None:
    """The action on another stage (or the forward of the same one, at the end) whose result this one takes."""
    if action.kind is Kind.FORWARD:
        return Action(Kind.FORWARD, action.stage - 1, action.microbatch) if action.stage else None
    if action.stage == num_stages - 1:
        return Action(Kind.FORWARD, action.stage, action.microbatch)
    return Action(Kind.BACKWARD, action.stage + 1, action.microbatch)


def _consumer_of(action: Action, num_stages: int) -> Action | None:
    """The action on a neighbouring stage that takes this one's result."""
    stage = action.stage + (1 if action.kind is Kind.FORWARD else -1)
    return Action(action.kind, stage, action.microbatch) if 0 <= stage < num_stages else None


_SEND = {Kind.FORWARD: Kind.SEND_FORWARD, Kind.BACKWARD: Kind.SEND_BACKWARD}
_RECEIVE = {Kind.FORWARD: Kind.RECEIVE_FORWARD, Kind.BACKWARD: Kind.RECEIVE_BACKWARD}


def _add_messages(orders: Sequence[Sequence[Action]], num_stages: int) -> tuple[tuple[Action, ...], ...]:
    """Put both ends of every message where [Note: one global order of messages] says; a backward lasts two forwards."""
    spans = simulate(orders, num_stages, lambda action: 1.0 if action.kind is Kind.FORWARD else 2.0)
    # (time, 0 for a message and 1 for work that starts then, producer): equal on both ends of a message
    timed: list[list[tuple[tuple[float, int, int, int], Action]]] = [[] for _ in orders]
    for span in (span for rank in spans for span in rank):
        action = span.action
        timed[span.rank].append(((span.start, 1, action.stage, action.microbatch), action))
        if (consumer := _consumer_of(action, num_stages)) is not None:
            key = (span.end, 0, action.stage, action.microbatch)
            timed[span.rank].append((key, Action(_SEND[action.kind], action.stage, action.microbatch)))
            receive = Action(_RECEIVE[action.kind], consumer.stage, action.microbatch)
            timed[consumer.stage % len(orders)].append((key, receive))
    return tuple(tuple(action for _, action in sorted(rank, key=lambda item: item[0])) for rank in timed)
