"""Cost: days, GPU-hours, energy and money of a whole training, and which of several clusters stand out.

Only steps are counted: no restarts, no validation, no waiting in a queue. Energy is the board power of all GPUs times
the hours, without hosts, network and cooling; GPUs draw no more than their board power.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, log
from typing import NamedTuple

from dtlayout.costmodel.scenario import Scenario


@dataclass(frozen=True)
class Budget:
    """Length of a training, and the price of a GPU."""

    tokens: float
    """Tokens of the whole training."""
    price: float | None = None
    """Money for one GPU-hour; None if not given."""


class TrainingCost(NamedTuple):
    """Time, energy and money of a whole training."""

    steps: int
    """Steps until all tokens are seen; the last one may see more."""
    days: float
    """Days of steps, without a pause."""
    gpu_hours: float
    """Hours of all GPUs together."""
    energy_mwh: float | None
    """Megawatt hours at the GPUs' board power; None if the board power is not known."""
    money: float | None
    """Price of the GPU-hours; None without a price."""


class Marks(NamedTuple):
    """Clusters that stand out, as indices into a list of costs."""

    cheapest: int
    """Fewest GPU-hours; of equal ones the fastest."""
    fastest: int
    """Fewest days; of equal ones the cheapest."""
    knee: int | None
    """The cluster after which each further day saved costs clearly more; None if none lies between the other two."""


def find_cost(scenario: Scenario, step_time_s: float, budget: Budget) -> TrainingCost:
    """Cost of training on the scenario's GPUs, if a step takes `step_time_s`."""
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
    """The cheapest, the fastest and the knee; None if there is no cost.

    The knee is the cost that lies farthest below the line from the fastest to the cheapest, with days and GPU-hours on
    logarithmic axes.

    >>> find_marks([TrainingCost(1, days, hours, None, None) for days, hours in ((10, 100), (5, 105), (4, 200))])
    Marks(cheapest=0, fastest=2, knee=1)
    """
    known = [(index, cost) for index, cost in enumerate(costs) if cost is not None]
    if not known:
        return None
    cheapest, least = min(known, key=lambda each: (each[1].gpu_hours, each[1].days))
    fastest, most = min(known, key=lambda each: (each[1].days, each[1].gpu_hours))

    def share(value: float, low: float, high: float) -> float:
        return log(value / low) / log(high / low) if high > low else inf

    def below(cost: TrainingCost) -> float:
        """Distance of a cost below the line, as a share of the triangle between the fastest and the cheapest."""
        return 1 - share(cost.days, most.days, least.days) - share(cost.gpu_hours, least.gpu_hours, most.gpu_hours)

    knee, depth = max(((index, below(cost)) for index, cost in known), key=lambda each: each[1])
    is_between = depth > 0 and knee not in (cheapest, fastest)
    return Marks(cheapest, fastest, knee if is_between else None)
