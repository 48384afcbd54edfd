"""What `recommend --tokens` says: the cost of a training, for people and as JSON."""

from collections.abc import Callable, Sequence
from typing import Any

from dtlayout.costmodel.scenario import Scenario
from dtlayout.planner.cost import Budget, Marks, TrainingCost, find_cost, find_marks
from dtlayout.planner.sizing import ScaleRow
from dtlayout.records.intervals import find_intervals


def to_cost_document(scenario: Scenario, step_time_s: float, budget: Budget) -> dict[str, Any]:
    """The document of one layout's cost, with the range of its days, GPU-hours and money."""
    bounds = [
        find_cost(scenario, bound_s, budget) for bound_s in find_intervals(scenario).step_time.around(step_time_s)
    ]
    ranges: dict[str, Any] = {"days_range": [each.days for each in bounds]}
    ranges["gpu_hours_range"] = [each.gpu_hours for each in bounds]
    ranges["money_range"] = None if budget.price is None else [each.money for each in bounds]
    return {**_to_budget(budget), **find_cost(scenario, step_time_s, budget)._asdict(), **ranges}


def describe_cost(scenario: Scenario, step_time_s: float, budget: Budget) -> str:
    """A sentence on what the training takes."""
    found = to_cost_document(scenario, step_time_s, budget)

    def around(name: str, show: Callable[[float], str] = "{:,.0f}".format) -> str:
        low, high = found[f"{name}_range"]
        return f"{show(found[name])} ({show(low)} to {show(high)})"

    parts = [f"{found['steps']:,} steps", f"{around('days', _days)} days", f"{around('gpu_hours')} GPU-hours"]
    if found["energy_mwh"] is not None:
        parts.append(f"up to {found['energy_mwh']:,.1f} MWh at the GPUs' board power")
    if found["money"] is not None:
        parts.append(f"{around('money')} at {budget.price:g} for a GPU-hour")
    return f"{format_tokens(budget.tokens)} tokens take {', '.join(parts)}: steps alone, without restarts."


def find_scale_costs(rows: Sequence[ScaleRow], budget: Budget) -> list[TrainingCost | None]:
    """The cost of each row's best layout."""
    return [find_cost(row.scenario, e.step_time_s, budget) if (e := row.estimate) else None for row in rows]


def to_scale_costs(rows: Sequence[ScaleRow], budget: Budget | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What the document of several clusters says of costs: what each entry has more, and the whole document."""
    if budget is None:
        return [{} for _ in rows], {}
    costs = find_scale_costs(rows, budget)
    marks = find_marks(costs)
    names = {name: place if place is None else rows[place].num_gpus for name, place in _places(marks).items()}
    entries = [{"cost": cost and cost._asdict()} for cost in costs]
    return entries, {**_to_budget(budget), "marks": names}


def list_scale_costs(rows: Sequence[ScaleRow], budget: Budget) -> list[list[str]]:
    """Further columns of the table of several clusters, the heading first."""
    costs = find_scale_costs(rows, budget)
    places = _places(find_marks(costs))
    head = ["days", "GPU-hours", "MWh", *["money"] * (budget.price is not None), ""]
    cells = [head]
    for place, cost in enumerate(costs):
        if cost is None:
            cells.append([""] * len(head))
            continue
        marks = ", ".join(name for name, marked in places.items() if marked == place)
        energy = "n/a" if cost.energy_mwh is None else f"{cost.energy_mwh:,.0f}"
        money = [] if cost.money is None else [f"{cost.money:,.0f}"]
        cells.append([_days(cost.days), f"{cost.gpu_hours:,.0f}", energy, *money, marks])
    return cells


def _to_budget(budget: Budget) -> dict[str, Any]:
    return {"tokens": budget.tokens, "price_per_gpu_hour": budget.price}


def _places(marks: Marks | None) -> dict[str, int | None]:
    return marks._asdict() if marks else dict.fromkeys(Marks._fields)


def _days(days: float) -> str:
    return f"{days:,.0f}" if days >= 100 else f"{days:.1f}"


def format_tokens(tokens: float) -> str:
    """A number of tokens as people say it."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if tokens >= size:
            return f"{tokens / size:g}{letter}"
    return f"{tokens:,.0f}"
