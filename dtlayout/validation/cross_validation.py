"""Cross-validation: rows predicted by constants that never saw them, and intervals that follow from their errors.

`HOLD_OUT` has the ways in which rows are left out: their model, GPU type, site, engine, or the rows on more than half
of the most nodes. `leave_out` predicts in these ways, and `to_errors` puts what is measured over what was predicted
into the tables of constants/errors.toml, one for each of the kinds of records/intervals.py.

The range of n ratios is that of split conformal prediction (arXiv:1604.04173, sec. 2.2), in which the next ratio lies
with a probability of 0.9 if it is drawn like them and each tail holds 5 %. Rows of one model are more alike than that:
with 5 %, 88 of 100 rows lay inside ranges of other models' rows, with 4 % there are 91, for `COVERED` to hold; that was
chosen by these same rows. So a tail begins at the (n + 1)/25-th ratio from its end. Below 24 ratios there is none; then
it is the largest error, either way, which takes 9. Below 9 ratios nothing can be said, and the next kind of rows stands
for them. Where whole groups are new, sites or GPU types, each group that was left out counts as much as the others.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations
from math import exp, log
from typing import Any, NamedTuple

from dtlayout.base import toml
from dtlayout.base.formatting import plural
from dtlayout.costmodel.engine import Engine, without_fit
from dtlayout.records.intervals import (
    KNOWN,
    NEW_ENGINE,
    NEW_GPU,
    NEW_NODES,
    NEW_SITE,
    QUANTITIES,
    SAME,
    describe_scenario,
    look_up,
)
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
)
from dtlayout.validation.scores import Prediction

RowName = tuple[str, str]
"""Table and row of a run."""
_TAIL = 0.04
"""Share of the rows that each tail of a range may hold, for nine tenths of another model's rows inside."""
_TAIL_OF_GROUPS = 0.03
"""Share of a tail where groups are new as a whole: sites, GPU types, engines."""
_LEAST_ROWS = 9
"""Fewest rows whose largest error may stand for the bound of nine tenths of all."""
DIFFERENCES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Relative differences of predicted steps from which on pairs of layouts are counted together."""
_LEAST_RUNS = 2
"""Fewest runs for each constant of a fit: with fewer the constants match these runs, and predict no others."""
_LEAST_GROUPS = 5
"""Fewest groups of dense models alone, or of mixtures alone, that have a range of their own."""
_MOST_FITS = 8
"""Most fits of a group: models are left out in at most so many lots."""
_LEAST_SWEEP = 10
"""Rows of one scenario that make a sweep of it."""


@dataclass(frozen=True)
class HeldOutErrors:
    """Predictions by constants that were not fitted to the predicted rows."""

    predictions: dict[str, list[Prediction]]
    """The group that was left out, such as a model or a GPU type → the predictions for its runs."""
    kept: dict[str, list[Prediction]] = field(default_factory=dict)
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
    left_out = HeldOutErrors({})
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
                engines = _fit(others, [without_fit(engine) for engine in engines])
            for prediction in predict(with_engines(own, *engines)):
                left_out.predictions.setdefault(model_of(prediction.run), []).append(prediction)
    return left_out


def leave_gpus_out(runs: Sequence[Run], progress: Progress = lambda line: None) -> HeldOutErrors:
    """Predictions for an engine's runs on each GPU type by constants that were fitted to its runs on other types.

    Only constants that hold on any type are known then; an engine without such has general ones.
    """
    return _leave_groups_out(runs, gpu_of, progress)


def leave_sites_out(runs: Sequence[Run], progress: Progress = lambda line: None) -> HeldOutErrors:
    """Predictions for an engine's runs of each site by constants that were fitted to those of its other sites."""
    return _leave_groups_out(runs, lambda run: run.site, progress)


def leave_nodes_out(runs: Sequence[Run], progress: Progress = lambda line: None) -> HeldOutErrors:
    """Predictions for an engine's runs on more than half of its most nodes by constants fitted to all of its others."""
    most: dict[tuple[str, str], int] = {}
    for run in runs:
        key = run.scenario.engine.name, gpu_of(run)
        most[key] = max(most.get(key, 1), run.scenario.cluster.num_nodes)

    def find_half(run: Run) -> str:
        half = most[run.scenario.engine.name, gpu_of(run)] // 2
        return f"more than {plural(half, 'node')}" if half and run.scenario.cluster.num_nodes > half else ""

    return _leave_groups_out(runs, find_half, progress)


def leave_engines_out(runs: Sequence[Run], progress: Progress = lambda line: None) -> HeldOutErrors:
    """Predictions for all runs by constants of which none was fitted to any run of their engine."""
    left_out: dict[str, list[Prediction]] = {}
    for (name, _), group in group_runs(runs).items():
        engines = [without_fit(engine) for engine in find_engines(group)]
        left_out.setdefault(name, []).extend(predict(with_engines(group, *engines)))
    return HeldOutErrors(left_out)


def _leave_groups_out(runs: Sequence[Run], find: Callable[[Run], str], progress: Progress) -> HeldOutErrors:
    """Predictions for each engine's runs by its runs for which `find` returns another group.

    Where there are none, or where nothing was fitted to them, constants are those before any fit. Runs without a group
    are left out nowhere.
    """
    left_out: dict[str, list[Prediction]] = {}
    by_engine: dict[str, list[Run]] = {}
    for run in runs:
        by_engine.setdefault(run.scenario.engine.name, []).append(run)
    for name, rows in by_engine.items():
        engines = [without_fit(engine) for engine in find_engines(rows)]
        for group in filter(None, dict.fromkeys(map(find, rows))):
            own, others = _split(rows, find, [group])
            fitted = engines
            if others and any(engine.shared or engine.fitted for engine in engines):
                progress(f"fitting {name} without {group}")
                fitted = _fit(others, engines)
            left_out.setdefault(f"{name}, {group}", []).extend(predict(with_engines(own, *fitted)))
    return HeldOutErrors(left_out)


def _fit(runs: Sequence[Run], starts: list[Engine]) -> list[Engine]:
    """The engine on several GPU types fitted to runs; unchanged if they are too few, see `_LEAST_RUNS`."""
    from dtlayout.validation.fit import list_parameters  # only now: it imports scipy

    gpus = {gpu_of(run) for run in runs if run.ran}
    constants = list_parameters([engine for engine in starts if engine.gpu in gpus])
    enough = sum(run.ran for run in runs) >= _LEAST_RUNS * len(constants)
    return fit_engines(runs, starts) if enough else starts


# What their errors say.


class AllLeftOut(NamedTuple):
    """Rows that were left out in several ways."""

    ways: dict[str, HeldOutErrors]
    """Key of `HOLD_OUT` → the predictions of rows left out, with intervals that rest on other rows."""

    def without(self, rows: Container[RowName]) -> "AllLeftOut":
        """Predictions without those of these rows, and without groups that have no other."""
        return AllLeftOut({
            way: HeldOutErrors({
                group: kept
                for group, predictions in found.predictions.items()
                if (kept := [p for p in predictions if name_of(p.run) not in rows])
            })
            for way, found in self.ways.items()
        })  # fmt: skip


def leave_out(runs: Sequence[Run], ways: Container[str], progress: Progress = lambda line: None) -> AllLeftOut:
    """Leave rows out in the ways that are named, keys of `HOLD_OUT`; the others have no evidence."""
    found = AllLeftOut({name: leave(runs, progress) for name, leave in HOLD_OUT.items() if name in ways})
    return AllLeftOut({name: add_intervals(each, found) for name, each in found.ways.items()})


def to_intervals(found: AllLeftOut) -> dict[str, list[dict[str, Any]]]:
    """Quantity → low and high ratio of measured to predicted, for each kind of rows that are enough."""
    tables: dict[str, list[dict[str, Any]]] = {quantity: [] for quantity in QUANTITIES}

    def add(kind: str, keys: Mapping[str, str], rows: Sequence[tuple[Prediction, str]]) -> None:
        for quantity in QUANTITIES:
            scored = [(p.ratios[quantity], group) for p, group in rows if quantity in p.ratios]
            if bounds := find_range(scored, _TAIL if kind == KNOWN else _TAIL_OF_GROUPS):
                named = {"low": bounds[0], "high": bounds[1], "upper_quartile": find_upper_quartile(scored)}
                rounded = {name: float(f"{bound:.4g}") for name, bound in named.items()}
                tables[quantity].append({"kind": kind, **keys, "rows": len(scored), **rounded})

    models = found.ways["model"].all_predictions if "model" in found.ways else []
    alike: dict[tuple[str, ...], list[tuple[Prediction, str]]] = {}
    for prediction in models:
        facts = describe_scenario(prediction.run.scenario)
        alike.setdefault(tuple(facts[key] for key in SAME), []).append((prediction, ""))
    for values, rows in sorted(alike.items(), key=lambda item: item[0]):
        add(KNOWN, dict(zip(SAME, values, strict=True)), rows)
    for kind, way in _WAYS.items():
        if way in found.ways:
            pooled = [(p, group) for group, rows in found.ways[way].predictions.items() for p in rows]
            add(kind, {}, pooled)
            for key in ("model", "engine") if kind == NEW_NODES else ("model",):
                by_fact: dict[str, list[tuple[Prediction, str]]] = {}
                for prediction, group in pooled:
                    fact = describe_scenario(prediction.run.scenario)[key]
                    by_fact.setdefault(fact, []).append((prediction, group))
                for fact, own in sorted(by_fact.items()):
                    if key == "engine" or _has_tails(own):
                        add(kind, {key: fact}, own)
    return tables


def list_seen(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """The facts of rows that fits have seen, with each site and its most nodes."""
    most: dict[tuple[str, ...], int] = {}
    for run in runs:
        facts = describe_scenario(run.scenario)
        key = *(facts[name] for name in SAME), run.site
        most[key] = max(most.get(key, 1), run.scenario.cluster.num_nodes)
    return [{**dict(zip((*SAME, "site"), key, strict=True)), "nodes": nodes} for key, nodes in sorted(most.items())]


def _has_tails(rows: Sequence[tuple[Prediction, str]]) -> bool:
    """Whether groups are so many, and their rows, that a tail of them can be left out."""
    counts = Counter(group for p, group in rows if p.ratios)
    return (
        len(counts) >= _LEAST_GROUPS and max(1 / len(counts) / number for number in counts.values()) <= _TAIL_OF_GROUPS
    )


def find_range(rows: Sequence[tuple[float, str]], tail: float = _TAIL) -> tuple[float, float] | None:
    """The range of nine of ten further ratios, from ratios with their groups; None if they are too few.

    Each tail outside holds a share `tail` of them.

    Each group counts as much, however many rows it has.

    >>> find_range([(ratio, "a site") for ratio in (0.9, 1.0, 1.25, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)])
    (0.8, 1.25)
    """
    counts = Counter(group for _, group in rows)
    logs = sorted((log(ratio), 1 / len(counts) / counts[group]) for ratio, group in rows)
    low, high = _find_bound(logs, tail), _find_bound(logs[::-1], tail)
    if low is None or high is None:
        if len(logs) < _LEAST_ROWS:
            return None
        high = max(abs(value) for value, _ in logs)
        low = -high
    return exp(low), exp(high)


def find_upper_quartile(rows: Sequence[tuple[float, str]]) -> float:
    """The ratio that three quarters of some ratios do not pass, from ratios with their groups, of which each counts as
    much; at least one ratio.

    >>> find_upper_quartile([(1.0, "a"), (1.1, "a"), (1.2, "a"), (1.3, "a"), (2.0, "b"), (2.0, "b")])
    2.0
    """
    counts = Counter(group for _, group in rows)
    ratios = sorted(rows)
    shares = accumulate(1 / len(counts) / counts[group] for _, group in ratios)
    return next(ratio for (ratio, _), share in zip(ratios, shares, strict=True) if share >= 0.75 - 1e-9)


def _find_bound(weighted: Sequence[tuple[float, float]], tail: float) -> float | None:
    """The value at which a tail ends, from sorted values with their weights; None if the first weighs too much."""
    bound, share = None, 0.0
    for value, weight in weighted:
        share += weight
        if share > tail * (1 + 1 / len(weighted)) + 1e-9:
            break
        bound = value
    return bound


def add_intervals(found: HeldOutErrors, evidence: AllLeftOut) -> HeldOutErrors:
    """The predictions with intervals that rest on rows of other groups than their own."""
    everything = {name_of(p.run): p.run for way in evidence.ways.values() for p in way.all_predictions}

    def add(predictions: Sequence[Prediction]) -> list[Prediction]:
        own = {name_of(p.run) for p in predictions}
        errors: dict[str, Any] = to_intervals(evidence.without(own))
        errors["seen"] = list_seen(run for name, run in everything.items() if name not in own)
        return [
            replace(p, own_intervals=look_up(errors, describe_scenario(p.run.scenario), p.run.site, num_nodes))
            for p in predictions
            for num_nodes in [p.run.scenario.cluster.num_nodes]
        ]

    return replace(found, predictions={group: add(rows) for group, rows in found.predictions.items()})


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


def to_errors(found: AllLeftOut) -> str:
    """The file of errors of rows left out, constants/errors.toml, as TOML."""
    predictions = found.ways["engine"].all_predictions
    engines = [p.run.scenario.engine.name for p in predictions if p.ratios]
    counted = ", ".join(f"{engines.count(name)} of {name}" for name in sorted(set(engines)))
    head = (
        "# Written by dtlayout validate --errors, never by hand: where measured / predicted lies of nine rows of ten\n"
        "# that were left out of the fits (records/intervals.py), and how often layouts came in predicted order.\n"
    )
    order = count_orders(found.ways["model"].all_predictions)
    seen = list_seen(p.run for p in predictions)
    return head + toml.dumps(
        {"source": f"rows left out: {counted}", **to_intervals(found), "order": order, "seen": seen}
    )


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


def name_of(run: Run) -> RowName:
    """Table and row of a run."""
    return run.table, run.row


HOLD_OUT: dict[str, Callable[[Sequence[Run], Progress], HeldOutErrors]] = {
    "model": leave_models_out, "GPU type": leave_gpus_out, "site": leave_sites_out, "nodes": leave_nodes_out,
    "engine": leave_engines_out,
}  # fmt: skip
"""Name of what is left out → function that predicts the rows left out."""
_WAYS = {NEW_NODES: "nodes", NEW_SITE: "site", NEW_GPU: "GPU type", NEW_ENGINE: "engine"}
"""Kind of a range → the way in which its rows are left out."""
