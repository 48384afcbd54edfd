"""Cost: days, GPU-hours, energy and money of training on so many tokens, and which sizes of a cluster to look at.

Steps alone are counted: no restarts, validation or queue. Energy is the board power of all GPUs, which they stay at or
below, without hosts, network and cooling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, log
from typing import NamedTuple

from dtlayout.costmodel.scenario import Scenario


@dataclass(frozen=True)
class Budget:
    """What is to be trained, and what a GPU costs."""

    tokens: float
    """Tokens of the whole training."""
    price: float | None = None
    """Money for a GPU and an hour; None where nobody says."""


class TrainingCost(NamedTuple):
    """What a training takes."""

    steps: int
    """Steps until all tokens were seen."""
    days: float
    """Days of steps, without a pause."""
    gpu_hours: float
    """Hours of all GPUs together."""
    energy_mwh: float | None
    """Megawatt hours at the GPUs' board power; None where that is not known."""
    money: float | None
    """Price of the GPU-hours; None without a price."""


class Marks(NamedTuple):
    """Places in a list of costs, counted from 0."""

    cheapest: int
    """Fewest GPU-hours; of equal ones the fastest."""
    fastest: int
    """Fewest days; of equal ones the cheapest."""
    knee: int | None
    """From where each further day that is saved costs clearly more; None where no place lies between the other two."""


def find_cost(scenario: Scenario, step_time_s: float, budget: Budget) -> TrainingCost:
    """What training on the scenario's GPUs takes with steps so long."""
    cluster = scenario.cluster
    steps = ceil(budget.tokens / scenario.batch.num_tokens)
    hours = steps * step_time_s / 3600
    gpu_hours = hours * cluster.num_gpus
    power_w = cluster.gpu.board_power_w
    return TrainingCost(
        steps=steps,
        days=hours / 24,
        gpu_hours=gpu_hours,
        energy_mwh=None if power_w is None else gpu_hours * power_w / 1e6,
        money=None if budget.price is None else gpu_hours * budget.price,
    )


def find_marks(costs: Sequence[TrainingCost | None]) -> Marks | None:
    """The cheapest, the fastest and the knee; None where there is no cost.

    The knee is the place that lies farthest below the line from the fastest to the cheapest, days and GPU-hours on
    logarithmic axes.

    >>> find_marks([TrainingCost(1, days, hours, None, None) for days, hours in ((10, 100), (5, 105), (4, 200))])
    Marks(cheapest=0, fastest=2, knee=1)
    """
    known = [(place, cost) for place, cost in enumerate(costs) if cost is not None]
    if not known:
        return None
    cheapest, least = min(known, key=lambda each: (each[1].gpu_hours, each[1].days))
    fastest, most = min(known, key=lambda each: (each[1].days, each[1].gpu_hours))

    def share(value: float, low: float, high: float) -> float:
        return log(value / low) / log(high / low) if high > low else inf

    def below(cost: TrainingCost) -> float:
        """How far a cost lies below the line, as a share of its triangle."""
        return 1 - share(cost.days, most.days, least.days) - share(cost.gpu_hours, least.gpu_hours, most.gpu_hours)

    knee, depth = max(((place, below(cost)) for place, cost in known), key=lambda each: each[1])
    is_between = depth > 0 and knee not in (cheapest, fastest)
    return Marks(cheapest, fastest, knee if is_between else None)
