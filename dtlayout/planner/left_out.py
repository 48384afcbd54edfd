"""Left out: rows predicted by constants that never saw them, nor others of their model, GPU type or engine."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dtlayout.planner.runs import Run
from dtlayout.planner.scores import Prediction
from dtlayout.planner.validate import (
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


@dataclass(frozen=True)
class LeftOut:
    """Predictions by constants that never saw what is predicted."""

    predictions: dict[str, list[Prediction]]
    """The model or GPU type that was left out → the predictions for its runs."""
    kept: dict[str, list[Prediction]]
    """Group, in words → predictions for its runs by constants that did see them, for there is no other model."""

    @property
    def all_predictions(self) -> list[Prediction]:
        """Those of what was left out."""
        return [prediction for found in self.predictions.values() for prediction in found]


def leave_models_out(runs: Sequence[Run], progress: Progress = lambda line: None) -> LeftOut:
    """Predictions for each model's runs by constants that were fitted to the other models' runs of the same group.

    A fit starts at general values, so that nothing of the shipped ones, which saw all runs, is left in it. An engine
    without fitted constants is predicted as it is; so is a group that has one model, and is told apart as `kept`.
    """
    left_out = LeftOut({}, {})
    for (name, gpu), group in group_for_fit(runs).items():
        engines, models = find_engines(group), list(dict.fromkeys(map(model_of, group)))
        is_fitted = any(engine.fitted or engine.shared for engine in engines)
        if is_fitted and len(models) == 1:
            left_out.kept[describe_group(name, gpu)] = predict(group)
            continue
        for model in models:
            own, others = _split(group, model_of, model)
            if is_fitted:
                progress(f"fitting {describe_group(name, gpu)} without {model}")
                engines = fit_engines(others, [without_fit(engine) for engine in engines])
            left_out.predictions.setdefault(model, []).extend(predict(with_engines(own, *engines)))
    return left_out


def leave_gpus_out(runs: Sequence[Run], progress: Progress = lambda line: None) -> LeftOut:
    """Predictions for the runs on each GPU type by constants that were fitted to the engine's runs on other types.

    Only constants that hold on any type are known then; an engine without such has general ones.
    """
    left_out = LeftOut({}, {})
    by_engine: dict[str, list[Run]] = {}
    for run in runs:
        by_engine.setdefault(run.scenario.engine.name, []).append(run)
    for name, group in by_engine.items():
        engines = [without_fit(engine) for engine in find_engines(group)]
        for gpu in [engine.gpu for engine in engines]:
            own, others = _split(group, gpu_of, gpu)
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


def _split(runs: Iterable[Run], find: Callable[[Run], str], name: str) -> tuple[list[Run], list[Run]]:
    """Runs of which `find` says that name, and the others."""
    parts: tuple[list[Run], list[Run]] = [], []
    for run in runs:
        parts[find(run) != name].append(run)
    return parts


def model_of(run: Run) -> str:
    """The name of its model."""
    return run.scenario.model.name


def gpu_of(run: Run) -> str:
    """The name of its GPU type."""
    return run.scenario.cluster.gpu.name
