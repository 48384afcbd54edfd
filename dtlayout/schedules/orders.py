"""Orders of schedules whose backwards are whole: a rank's forwards and backwards one after the other.

GPipe arXiv:1811.06965; 1F1B arXiv:2006.09503; interleaved 1F1B arXiv:2104.04473, sec. 2.2; breadth first
arXiv:2211.05953. p pipeline ranks, v virtual stages on each, m microbatches.
"""

from dtlayout.schedules.actions import Action, Kind
from dtlayout.schedules.placement import Placement


def order_breadth_first(placement: Placement, rank: int, m: int) -> list[Action]:
    """All microbatches through one stage, then through the rank's next one; backwards begin with the last stage."""
    stages = placement.stages_of(rank)
    ways = ((Kind.FORWARD, stages), (Kind.BACKWARD, reversed(stages)))
    return [Action(kind, stage, i) for kind, in_order in ways for stage in in_order for i in range(m)]


def order_1f1b(placement: Placement, rank: int, m: int) -> list[Action]:
    """A forward and a backward in turn, after one forward for each rank behind this one."""
    forwards = [Action(Kind.FORWARD, rank, i) for i in range(m)]
    backwards = [Action(Kind.BACKWARD, rank, i) for i in range(m)]
    return _alternate(forwards, backwards, warm_up=placement.num_ranks - 1 - rank)


def order_interleaved_1f1b(placement: Placement, rank: int, m: int) -> list[Action]:
    """Rounds of p microbatches through chunk 0, then chunk 1, …; backwards go through the chunks in opposite order."""
    p, v, stages = placement.num_ranks, placement.virtual_stages, placement.stages_of(rank)

    def nth(kind: Kind, n: int) -> Action:
        chunk = n // p % v
        return Action(kind, stages[chunk if kind is Kind.FORWARD else v - 1 - chunk], n // (p * v) * p + n % p)

    forwards = [nth(Kind.FORWARD, n) for n in range(m * v)]
    backwards = [nth(Kind.BACKWARD, n) for n in range(m * v)]
    return _alternate(forwards, backwards, warm_up=(v - 1) * p + 2 * (p - 1 - rank))


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then a forward and a backward in turn, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    steady = len(forwards) - warm_up
    pairs = zip(forwards[warm_up:], backwards[:steady], strict=True)
    return [*forwards[:warm_up], *(action for pair in pairs for action in pair), *backwards[steady:]]
