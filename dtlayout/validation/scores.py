"""Scores of predictions against measured runs.

| score | over | what |
|---|---|---|
| fit | ok and oom | balanced accuracy of fits / does not fit |
| mape, median_ape | ran with mfu >= 0.05 | mean and median of abs(predicted MFU / measured - 1) |
| tau | ran, per table | Kendall's tau-b of predicted against measured MFU; the mean over tables |
| top1 | per table | measured MFU of the best predicted to fit (0 if it did not run) / best measured; the mean |
| memory | peak given | median of abs(predicted peak / measured - 1) on pipeline rank 0 |
| false_oom | ran, with `tells_memory` | share that is predicted not to fit |

On a CPU, which has no MFU, all of it is said of steps a second. Groups of rows have the medians of the errors of speed
and memory alone, signed and absolute, and the share of rows inside the interval that was predicted for them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean, median
from typing import Any

from dtlayout.costmodel.estimate import Estimate
from dtlayout.records.intervals import QUANTITIES, Interval, Quantity, describe_scenario, find_intervals
from dtlayout.records.run import Run

LOWEST_MFU = 0.05
"""Runs below are stalled or bound by the host; their speed is not scored."""


@dataclass(frozen=True)
class Prediction:
    """A run and what was predicted for it."""

    run: Run
    estimate: Estimate
    own_intervals: Mapping[Quantity, Interval] | None = None
    """Intervals that rest on rows other than those left out with it; None for the shipped intervals."""

    @property
    def speed(self) -> float:
        """Predicted value of what `Run.speed` measures: MFU, or steps a second on a CPU."""
        has_mfu = self.run.mfu is not None or self.run.scenario.cluster.gpu.has_mfu
        return self.estimate.mfu if has_mfu else 1 / self.estimate.step_time_s

    @property
    def speed_error(self) -> float:
        """Predicted over measured speed, less 1."""
        assert self.run.speed is not None, "only of runs with a speed"
        return self.speed / self.run.speed - 1

    @property
    def is_scored(self) -> bool:
        """Whether its speed is scored: it ran, and its MFU is not below `LOWEST_MFU`."""
        return self.run.ran and (self.run.mfu is None or self.run.mfu >= LOWEST_MFU)

    @property
    def memory_error(self) -> float:
        """Predicted over measured peak of pipeline rank 0, less 1."""
        assert self.run.peak_bytes is not None, "only of runs with a peak"
        return self.estimate.memory[0].total / self.run.peak_bytes - 1

    @property
    def ratios(self) -> dict[Quantity, float]:
        """Quantity → measured over predicted value, for the quantities that are scored."""
        found: dict[Quantity, float] = {}
        if self.is_scored:
            found["step_time"] = 1 + self.speed_error
        if self.run.has_peak:
            found["peak_memory"] = 1 / (1 + self.memory_error)
        return found

    @property
    def intervals(self) -> Mapping[Quantity, Interval]:
        """Quantity → the interval that was predicted for its ratio."""
        if self.own_intervals is not None:
            return self.own_intervals
        return find_intervals(self.run.scenario, self.run.site).by_quantity()


@dataclass(frozen=True)
class Scores:
    """Scores of predictions, as fractions; None where a score has no rows."""

    fit: float | None
    mape: float | None
    median_ape: float | None
    tau: float | None
    top1: float | None
    memory: float | None
    false_oom: float | None
    rows: int


SCORES = {
    "fit": "fit", "mape": "MAPE", "median_ape": "median", "tau": "tau", "top1": "top-1", "memory": "memory",
    "false_oom": "false OOM",
}  # fmt: skip
"""Score → its name in tables."""
PLAIN_SCORES = ("fit", "tau", "top1")
"""Scores that are no percentages."""


def format_score(scores: Mapping[str, Any], name: str) -> str:
    """One score of a document of scores, as tables have it."""
    value = scores[name]
    return "–" if value is None else f"{value:.3f}" if name in PLAIN_SCORES else format_percent(value)


def format_percent(value: float | None) -> str:
    """A fraction in percent; a dash where there is none."""
    return "–" if value is None else f"{100 * value:.{1 if value < 10 else 0}f} %"


@dataclass(frozen=True)
class Errors:
    """Medians of the relative errors of predictions; None without rows."""

    rows: int
    signed: float | None
    """Median of predicted / measured - 1: above 0 where predictions are too high."""
    absolute: float | None
    inside: float | None
    """Share of the rows that lie inside the interval that was predicted for them."""


@dataclass(frozen=True)
class GroupScores:
    """Errors of predictions for the rows of a group."""

    rows: int
    speed: Errors
    """Errors of speed, over rows that ran with mfu >= 0.05."""
    memory: Errors
    """Errors of the peak, over rows whose peak is given."""


GROUPINGS: dict[str, Callable[[Run], str]] = {
    "engine": lambda run: run.scenario.engine.name,
    "gpu": lambda run: run.scenario.cluster.gpu.name,
    "engine on gpu": lambda run: f"{run.scenario.engine.name} on {run.scenario.cluster.gpu.name}",
    "precision": lambda run: describe_scenario(run.scenario)["precision"],
    "source": lambda run: run.source or "not stated",
}
"""Name of a grouping → function from a row to its group."""


def score(predictions: Sequence[Prediction]) -> Scores:
    """The scores of one table, or pooled over several."""
    tables = list(by_table(predictions).values())
    judged = [p for p in predictions if p.run.ran and p.run.tells_memory]
    errors = [abs(p.speed_error) for p in predictions if p.is_scored]
    return Scores(
        fit=_score_fit(predictions),
        mape=_over(mean, errors),
        median_ape=_over(median, errors),
        tau=_over(mean, map(_score_ranking, tables)),
        top1=_over(mean, map(_score_best, tables)),
        memory=_over(median, (abs(p.memory_error) for p in predictions if p.run.has_peak)),
        false_oom=_over(mean, (not p.estimate.fits for p in judged)),
        rows=len(predictions),
    )


def score_group(predictions: Sequence[Prediction]) -> GroupScores:
    """The median errors of speed and memory of a group."""
    speeds = [p.speed_error for p in predictions if p.is_scored]
    peaks = [p.memory_error for p in predictions if p.run.has_peak]
    speed_inside, memory_inside = (_over(mean, _list_inside(predictions, quantity)) for quantity in QUANTITIES)
    return GroupScores(len(predictions), _to_errors(speeds, speed_inside), _to_errors(peaks, memory_inside))


def _list_inside(predictions: Iterable[Prediction], quantity: Quantity) -> list[bool]:
    """Whether each row with an interval lies inside it."""
    rows = [(p.ratios, p.intervals) for p in predictions]
    return [
        intervals[quantity].holds(ratios[quantity])
        for ratios, intervals in rows
        if quantity in ratios and quantity in intervals
    ]


def _to_errors(errors: Sequence[float], inside: float | None) -> Errors:
    return Errors(len(errors), _over(median, errors), _over(median, map(abs, errors)), inside)


def by_group(predictions: Iterable[Prediction]) -> dict[str, dict[str, list[Prediction]]]:
    """Grouping → group → its predictions, groups in their first order."""
    groups: dict[str, dict[str, list[Prediction]]] = {grouping: {} for grouping in GROUPINGS}
    for prediction in predictions:
        for grouping, find in GROUPINGS.items():
            groups[grouping].setdefault(find(prediction.run), []).append(prediction)
    return groups


def by_table(predictions: Iterable[Prediction]) -> dict[str, list[Prediction]]:
    """Table → its predictions, tables in their first order."""
    tables: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        tables.setdefault(prediction.run.table, []).append(prediction)
    return tables


def kendall_tau_b(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Kendall's tau-b, ties counted in neither order; None where one of the two is constant.

    >>> kendall_tau_b([1, 2, 3], [1, 3, 2])
    0.3333333333333333
    """
    agreeing = pairs_x = pairs_y = 0
    for (x1, y1), (x2, y2) in combinations(zip(x, y, strict=True), 2):
        agreeing += ((x1 > x2) - (x1 < x2)) * ((y1 > y2) - (y1 < y2))
        pairs_x += x1 != x2
        pairs_y += y1 != y2
    return float(agreeing / (pairs_x * pairs_y) ** 0.5) if pairs_x and pairs_y else None


def _over(average: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    """The average of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return average(known) if known else None


def _score_fit(predictions: Iterable[Prediction]) -> float | None:
    fitted = [p.estimate.fits for p in predictions if p.run.outcome == "ok"]
    failed = [not p.estimate.fits for p in predictions if p.run.outcome == "oom"]
    return (mean(fitted) + mean(failed)) / 2 if fitted and failed else None


def _score_ranking(table: Iterable[Prediction]) -> float | None:
    ran = [p for p in table if p.run.ran]
    return kendall_tau_b([p.speed for p in ran], [p.run.speed or 0.0 for p in ran])


def _score_best(table: Sequence[Prediction]) -> float | None:
    candidates = [p for p in table if p.run.outcome in ("ok", "oom", "crashed_or_oom") and p.estimate.fits]
    best = max((p.run.speed or 0.0 for p in table if p.run.ran), default=0.0)
    if not candidates or not best:
        return None
    picked = max(candidates, key=lambda p: p.speed)
    return (picked.run.speed or 0.0) / best if picked.run.ran else 0.0
