"""Eager 1F1B, arXiv:2211.05322, as somebody adds it: warm-ups of twice the depth, so that messages hide behind them."""

from dtlayout import PipelineSchedule, register_schedule
from dtlayout.schedules.actions import Action, Kind
from dtlayout.schedules.placement import Placement


def order(placement: Placement, rank: int, m: int) -> list[Action]:
    """A rank starts as many forwards as it is stages away from the end and back, and one, before its first backward."""
    ahead = min(2 * (placement.num_ranks - 1 - rank) + 1, m)
    actions = [Action(Kind.FORWARD, rank, i) for i in range(ahead)]
    for i in range(m):
        actions.append(Action(Kind.BACKWARD, rank, i))
        actions += [Action(Kind.FORWARD, rank, ahead + i)] if ahead + i < m else []
    return actions


register_schedule(PipelineSchedule(name="eager-1f1b", order=order, least_rounds=1))
