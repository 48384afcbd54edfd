"""Cross-validation: rows predicted by constants that never saw them, and intervals that follow from their errors.

`leave_models_out`, `leave_gpus_out` and `leave_engines_out` predict, `leave_out` in all of these ways; `to_errors` puts
what is measured over what was predicted into the tables of constants/errors.toml, one for each of the kinds of
records/intervals.py.

The range of n ratios is that of split conformal prediction (arXiv:1604.04173, sec. 2.2), in which the next ratio lies
with a probability of 0.9 if it is drawn like them and each tail holds 5 %. Rows of one model are more alike than that:
with 5 %, 88 of 100 rows lay inside ranges of other models' rows, with 4 % there are 91, for `COVERED` to hold; that was
chosen by these same rows. So a tail begins at the (n + 1)/25-th ratio from its end. Below 24 ratios there is none; then
it is the largest error, either way, which takes 9. Below 9 ratios nothing can be said, and the next kind of rows stands
for them.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import exp, log
from typing import Any, NamedTuple

from dtlayout.base import toml
from dtlayout.records.intervals import KINDS, QUANTITIES, describe_scenario, look_up
from dtlayout.records.run import Run
from dtlayout.validation.predict import (
    Progress,
    describe_group,
    find_engines,
    fit_engines,
    group_for_fit,
    group_runs,
    predict,
    with_engines,
    without_fit,
)
from dtlayout.validation.scores import Prediction

_TAIL = 0.04
"""Share of the rows that each tail of a range may hold, for nine tenths of another model's rows inside."""
_LEAST_ROWS = 9
"""Fewest rows whose largest error may stand for the bound of nine tenths of all."""
DIFFERENCES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Relative differences of predicted steps from which on pairs of layouts are counted together."""
_MOST_FITS = 8
"""Most fits of a group: models are left out in at most so many lots."""
_LEAST_SWEEP = 10
"""Rows of one scenario that make a sweep of it."""


@dataclass(frozen=True)
class HeldOutErrors:
    """Predictions by constants that were not fitted to the predicted rows."""

    predictions: dict[str, list[Prediction]]
    """The model or GPU type that was left out → the predictions for its runs."""
    kept: dict[str, list[Prediction]]
    """Group, in words → predictions for its runs by constants that did see them, for there is no other model."""

    @property
    def all_predictions(self) -> list[Prediction]:
        """Predictions for all rows that were left out."""
        return [prediction for found in self.predictions.values() for prediction in found]


def leave_models_out(runs: Sequence[Run], progress: Progress = lambda line: None) -> HeldOutErrors:
    """Predictions for each model's runs by constants that were fitted to the other models' runs of the same group.

    More than eight models are left out in eight lots, since each takes a fit.

    A fit starts at general values, so that nothing of the shipped ones, which saw all runs, is left in it. An engine
    without fitted constants is predicted as it is; so is a group that has one model, and is told apart as `kept`.
    """
    left_out = HeldOutErrors({}, {})
    for (name, gpu), group in group_for_fit(runs).items():
        engines, models = find_engines(group), list(dict.fromkeys(map(model_of, group)))
        is_fitted = any(engine.fitted or engine.shared for engine in engines)
        if is_fitted and len(models) == 1:
            left_out.kept[describe_group(name, gpu)] = predict(group)
            continue
        for lot in [models[i::_MOST_FITS] for i in range(min(_MOST_FITS, len(models)))]:
            own, others = _split(group, model_of, lot)
            if is_fitted:
                progress(f"fitting {describe_group(name, gpu)} without {', '.join(lot)}")
                engines = fit_engines(others, [without_fit(engine) for engine in engines])
            for prediction in predict(with_engines(own, *engines)):
                left_out.predictions.setdefault(model_of(prediction.run), []).append(prediction)
    return left_out


def leave_gpus_out(runs: Sequence[Run], progress: Progress = lambda line: None) -> HeldOutErrors:
    """Predictions for the runs on each GPU type by constants that were fitted to the engine's runs on other types.

    Only constants that hold on any type are known then; an engine without such has general ones.
    """
    left_out = HeldOutErrors({}, {})
    by_engine: dict[str, list[Run]] = {}
    for run in runs:
        by_engine.setdefault(run.scenario.engine.name, []).append(run)
    for name, group in by_engine.items():
        engines = [without_fit(engine) for engine in find_engines(group)]
        for gpu in [engine.gpu for engine in engines]:
            own, others = _split(group, gpu_of, [gpu])
            fitted = engines
            if others and any(engine.shared for engine in engines):
                progress(f"fitting {name} without {gpu}")
                fitted = fit_engines(others, engines)
            left_out.predictions.setdefault(gpu, []).extend(predict(with_engines(own, *fitted)))
    return left_out


def leave_engines_out(runs: Iterable[Run]) -> list[Prediction]:
    """Predictions for all runs by constants of which none was fitted to any run of their engine."""
    return [
        prediction
        for group in group_runs(runs).values()
        for prediction in predict(with_engines(group, *map(without_fit, find_engines(group))))
    ]


# What their errors say.


class Evidence(NamedTuple):
    """Predictions for all rows: with their model left out, their GPU type left out, and their engine left out."""

    models: Sequence[Prediction]
    gpus: Sequence[Prediction]
    engines: Sequence[Prediction]

    def without(self, engine: str, find: Callable[[Run], str], name: str) -> "Evidence":
        """Evidence without the rows of an engine for which `find` returns this name."""

        def is_other(prediction: Prediction) -> bool:
            return prediction.run.scenario.engine.name != engine or find(prediction.run) != name

        return Evidence(*(list(filter(is_other, found)) for found in self))


class AllLeftOut(NamedTuple):
    """Rows that were left out in several ways, and all of their predictions as evidence for intervals."""

    ways: dict[str, HeldOutErrors]
    """Key of `HOLD_OUT_BY` → the predictions of rows left out, with intervals that rest on other rows."""
    evidence: Evidence


def leave_out(runs: Sequence[Run], ways: Container[str], progress: Progress = lambda line: None) -> AllLeftOut:
    """Leave out models or GPU types as `ways` names them, and always engines; other ways have no evidence."""
    found = {name: leave(runs, progress) for name, (leave, _) in HOLD_OUT_BY.items() if name in ways}
    models, gpus = (found[name].all_predictions if name in found else [] for name in HOLD_OUT_BY)
    evidence = Evidence(models, gpus, leave_engines_out(runs))
    return AllLeftOut(
        {name: add_intervals(each, HOLD_OUT_BY[name][1], evidence) for name, each in found.items()}, evidence
    )


def to_intervals(evidence: Evidence) -> dict[str, list[dict[str, Any]]]:
    """Quantity → low and high ratio of measured to predicted, for each kind of rows that are enough."""
    rows = {"known": evidence.models, "new GPU": evidence.gpus, "new precision": evidence.gpus,
            "new engine": evidence.engines}  # fmt: skip
    tables: dict[str, list[dict[str, Any]]] = {quantity: [] for quantity in QUANTITIES}
    for kind in KINDS:
        groups: dict[tuple[str, ...], list[Prediction]] = {}
        for prediction in rows[kind.name]:
            scenario = describe_scenario(prediction.run.scenario)
            groups.setdefault(tuple(scenario[key] for key in kind.keys), []).append(prediction)
        for (values, group), quantity in product(sorted(groups.items(), key=lambda item: item[0]), QUANTITIES):
            scored = [(p.ratios[quantity], p.run.scenario.engine.name) for p in group if quantity in p.ratios]
            if bounds := find_range(scored):
                keys = dict(zip(kind.keys, values, strict=True))
                low, high = (float(f"{bound:.4g}") for bound in bounds)
                tables[quantity].append({"kind": kind.name, **keys, "rows": len(scored), "low": low, "high": high})
    return tables


def find_range(rows: Sequence[tuple[float, str]]) -> tuple[float, float] | None:
    """The range of nine of ten further ratios, from ratios with their engines; None if they are too few.

    Each engine counts as much, however many rows it has.

    >>> find_range([(ratio, "megatron") for ratio in (0.9, 1.0, 1.25, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)])
    (0.8, 1.25)
    """
    counts = Counter(engine for _, engine in rows)
    logs = sorted((log(ratio), 1 / len(counts) / counts[engine]) for ratio, engine in rows)
    low, high = _find_bound(logs), _find_bound(logs[::-1])
    if low is None or high is None:
        if len(logs) < _LEAST_ROWS:
            return None
        high = max(abs(value) for value, _ in logs)
        low = -high
    return exp(low), exp(high)


def _find_bound(weighted: Sequence[tuple[float, float]]) -> float | None:
    """The value at which a tail ends, from sorted values with their weights; None if the first weighs too much."""
    bound, share = None, 0.0
    for value, weight in weighted:
        share += weight
        if share > _TAIL * (1 + 1 / len(weighted)) + 1e-9:
            break
        bound = value
    return bound


def add_intervals(found: HeldOutErrors, find: Callable[[Run], str], evidence: Evidence) -> HeldOutErrors:
    """The predictions with intervals that rest on other rows; `find` names the model or GPU type of a run."""

    def add(name: str, predictions: Sequence[Prediction]) -> list[Prediction]:
        engines = {p.run.scenario.engine.name for p in predictions}
        errors = {engine: to_intervals(evidence.without(engine, find, name)) for engine in engines}
        return [
            replace(p, own_intervals=look_up(errors[scenario["engine"]], scenario))
            for p in predictions
            for scenario in [describe_scenario(p.run.scenario)]
        ]

    return replace(found, predictions={name: add(name, rows) for name, rows in found.predictions.items()})


def count_orders(predictions: Iterable[Prediction]) -> list[dict[str, Any]]:
    """How often pairs of one sweep's rows came in the order that was predicted, by how far apart they were predicted.

    For each engine, and first for all together.
    """
    sweeps: dict[Any, list[Prediction]] = {}
    for prediction in predictions:
        if prediction.is_scored:
            sweeps.setdefault((prediction.run.table, prediction.run.scenario), []).append(prediction)
    counts: dict[str, list[list[int]]] = {}
    for (_, scenario), rows in sweeps.items():
        if len(rows) >= _LEAST_SWEEP:
            for difference, is_right in _compare(rows):
                place = max(i for i, least in enumerate(DIFFERENCES) if difference >= least)
                for name in ("", scenario.engine.name):
                    of_engine = counts.setdefault(name, [[0, 0] for _ in DIFFERENCES])
                    of_engine[place][0] += 1
                    of_engine[place][1] += is_right
    return [
        {**({"engine": name} if name else {}), "least": least, "pairs": pairs, "right": right}
        for name, of_engine in sorted(counts.items())
        for least, (pairs, right) in zip(DIFFERENCES, of_engine, strict=True)
    ]


def _compare(rows: Sequence[Prediction]) -> Iterator[tuple[float, bool]]:
    """Difference of each pair's predicted steps, over the shorter one, and whether that one was the faster."""
    for one, other in combinations(sorted(rows, key=lambda row: -row.speed), 2):
        if one.speed != other.speed:
            yield one.speed / other.speed - 1, (one.run.speed or 0) > (other.run.speed or 0)


def to_errors(evidence: Evidence) -> str:
    """The file of errors of rows left out, constants/errors.toml, as TOML."""
    engines = [p.run.scenario.engine.name for p in evidence.engines if p.ratios]
    counted = ", ".join(f"{engines.count(name)} of {name}" for name in sorted(set(engines)))
    head = (
        "# Written by dtlayout validate --errors, never by hand: where measured / predicted lies of nine rows of ten\n"
        "# that were left out of the fits (records/intervals.py), and how often layouts came in predicted order.\n"
    )
    tables = {"source": f"rows left out: {counted}", **to_intervals(evidence), "order": count_orders(evidence.models)}
    return head + toml.dumps(tables)


def _split(runs: Iterable[Run], find: Callable[[Run], str], names: Container[str]) -> tuple[list[Run], list[Run]]:
    """Runs for which `find` returns one of the names, and the other runs."""
    parts: tuple[list[Run], list[Run]] = [], []
    for run in runs:
        parts[find(run) not in names].append(run)
    return parts


def model_of(run: Run) -> str:
    """Name of a run's model."""
    return run.scenario.model.name


def gpu_of(run: Run) -> str:
    """Name of a run's GPU type."""
    return run.scenario.cluster.gpu.name


HOLD_OUT_BY = {"model": (leave_models_out, model_of), "GPU type": (leave_gpus_out, gpu_of)}
"""Name of what is left out → function that predicts the rows left out, and function from a run to its name."""
