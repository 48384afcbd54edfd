"""Fitted constants: the piece of an engine's file that has them, and their JSON form."""

from collections.abc import Iterable
from dataclasses import asdict
from statistics import quantiles
from typing import Any

from dtlayout.base import toml
from dtlayout.base.formatting import align, plural
from dtlayout.costmodel.engine import ANY_GPU, Engine
from dtlayout.validation.predict import Fitted
from dtlayout.validation.scores import SCORES, Prediction, format_score, score


def list_fitted(fitted: Fitted) -> dict[str, dict[str, Any]]:
    """GPU type → the constants that were fitted to its runs, and their scores, as JSON has them."""
    at_bounds = _find_at_bounds(fitted)
    return {
        gpu: {
            "engine": fitted.engines[0].name, "constants": constants,
            "at_bounds": [name for name in at_bounds if name in constants],
            "scores": asdict(score(_find_on(gpu, fitted.predictions))),
        }
        for gpu, constants in _list_constants(fitted).items()
    }  # fmt: skip


def format_fragment(fitted: Fitted) -> str:
    """Fitted constants as TOML for the engine's file, with the scores before and after the fit as comments."""
    scores, before = asdict(score(fitted.predictions)), asdict(fitted.before)
    cells = [[name, format_score(before, name), format_score(scores, name)] for name in SCORES]
    summary = [f"{fitted.engines[0].name}: scores of the {plural(scores['rows'], 'row')} before and after this fit"]
    summary += align(cells, ("<16", ">6", ">8"))
    errors = [100 * p.speed_error for p in fitted.predictions if p.is_scored]
    if len(errors) > 1:
        tenths = quantiles(errors, n=10, method="inclusive")
        spread = ", ".join(f"{name} {tenths[i]:+.1f} %" for name, i in (("p10", 0), ("median", 4), ("p90", 8)))
        summary.append(f"error of speed after: {spread}")
    summary.append(f"at a bound: {', '.join(_find_at_bounds(fitted)) or 'none'}")
    if unchanged := _find_unchanged(fitted):
        summary.append(f"left as they were by these runs: {', '.join(unchanged)}")
    tables = {}
    for gpu, constants in _list_constants(fitted).items():
        ran = [p.run for p in _find_on(gpu, fitted.predictions) if p.run.ran]
        models = ", ".join(dict.fromkeys(run.scenario.model.name for run in ran))
        gpus = {"gpus": sorted({run.scenario.cluster.gpu.name for run in ran})} if gpu == ANY_GPU else {}
        tables[gpu] = {"source": f"{plural(len(ran), 'run')} of {models}", **gpus, **constants}
    return "".join(f"# {line}\n" for line in summary) + toml.dumps({"fitted": tables})


def _find_at_bounds(fitted: Fitted) -> list[str]:
    return list(dict.fromkeys(name for engine in fitted.engines for name in engine.at_bounds))


def _find_unchanged(fitted: Fitted) -> list[str]:
    """Constants that the fit has left as they were on every GPU type."""
    names = dict.fromkeys(name for engine in fitted.engines for name in (*engine.shared, *engine.fitted))
    told = set[str]().union(*map(_find_told, fitted.starts, fitted.engines))
    return [name for name in names if name not in told]


def _find_told(start: Engine, engine: Engine) -> set[str]:
    """Constants that a fit has moved away from where it started."""
    names = (*engine.shared, *engine.fitted)
    return {name for name in names if getattr(engine.constants, name) != getattr(start.constants, name)}


def _list_constants(fitted: Fitted) -> dict[str, dict[str, float]]:
    """GPU type → the constants fitted to its runs, with four digits; ANY_GPU → those fitted to all types."""
    tables: dict[str, dict[str, float]] = {}
    for start, engine in zip(fitted.starts, fitted.engines, strict=True):
        for gpu, names in ((ANY_GPU, engine.shared), (engine.gpu, engine.fitted)):
            told = _find_told(start, engine)
            values = {name: float(f"{getattr(engine.constants, name):.4g}") for name in names if name in told}
            if values:
                tables.setdefault(gpu, {}).update(values)
    return dict(sorted(tables.items(), key=lambda item: item[0] != ANY_GPU))


def _find_on(gpu: str, predictions: Iterable[Prediction]) -> list[Prediction]:
    """Predictions for runs on a GPU type; all predictions for ANY_GPU."""
    return [p for p in predictions if gpu in (ANY_GPU, p.run.scenario.cluster.gpu.name)]
