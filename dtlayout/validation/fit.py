"""Fit: an engine's constants, from runs that were measured on one GPU type or several.

Constants that hold on any type (`Engine.shared`) and those of each (`Engine.fitted`) are fitted at once: the first are
told by all runs, the others by those on their type. A constant that no run speaks of stays as it is.

Memory comes first, since nothing of it depends on speed: peaks where they were measured, and on which side of the
capacity a run fell where only that is known. Then speed: the logarithm of predicted over measured step time. The loss
of both (Cauchy's) grows as the logarithm of the error, for some runs stall for reasons outside any model, and constants
that followed those would move with every run that is left out. Every constant stays inside its bounds
(`costmodel.engine.Constants`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from dtlayout.base.errors import DtlayoutError
from dtlayout.costmodel.engine import ANY_GPU, Engine, without_fit
from dtlayout.costmodel.engine_constants import BOUNDS
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.memory import RankMemory
from dtlayout.records.run import Run
from dtlayout.validation.scores import LOWEST_MFU

MEMORY_CONSTANTS = frozenset({
    "score_saved_bytes", "fused_score_saved_bytes", "flash1_saved_bytes", "norm_saved_bytes", "block_saved_bytes",
    "logit_bytes", "gathered_logit_bytes", "copy_bytes", "overhead_bytes", "fragment_share", "context_bytes",
    "run_ahead_bytes", "message_saved_bytes", "run_ahead_microbatches", "run_ahead_host_s",
})  # fmt: skip
"""Constants of memory; the others are of time."""

_MARGIN = 0.02
"""Relative distance from the capacity at which a run's outcome is no longer a matter of chance."""
_TIME_LOSSES = (("soft_l1", 0.02), ("cauchy", 0.02))
"""Losses of a step time, one fit after the other, each with the relative error from which on it grows slower than the
square; the last is blind to runs that are far off, so it must not come first."""
_OUTCOME_LOSSES = (("soft_l1", 0.01),)
"""The loss of outcomes alone, of which each is logistic."""
_PEAK_LOSSES = (*_OUTCOME_LOSSES, ("cauchy", 0.01))
"""Losses of a peak: how far a host ran ahead differs between runs of one layout."""
_PULL = 0.05
"""Residual of a constant that is a whole width of its bounds away from its value before any fit; it keeps a few rows
from moving it far."""
_FROM_END = 0.1
"""Least distance between a constant's start and its bounds, in widths of them: a small host's time changes no
prediction, so a fit that starts there finds no slope."""
_SLOW_WEIGHT = 0.3
"""Weight of runs below the lowest MFU that is scored."""


class Parameter(NamedTuple):
    """A constant that is fitted."""

    gpu: str
    """GPU type whose runs it is fitted to; ANY_GPU for runs on all types."""
    name: str


def refit(runs: Sequence[Run], starts: Sequence[Engine]) -> list[Engine]:
    """One engine on several GPU types with its constants fitted to runs, starting at those it has.

    DtlayoutError if there is no constant to fit. All runs are on these GPU types.
    """
    if not any(engine.fitted or engine.shared for engine in starts):
        gpus = [engine.gpu for engine in starts]
        tables = " and no ".join(f"[fitted.{gpu}]" for gpu in (ANY_GPU, *gpus))
        raise DtlayoutError(
            f"engine {starts[0].name} has no constants to fit on {', '.join(gpus)}: its file has no {tables}, nor are "
            f"there any of dtlayout calibrate"
        )
    by_gpu = _by_gpu(runs)
    parameters = list_parameters([engine for engine in starts if engine.gpu in by_gpu])
    of_memory = [each for each in parameters if each.name in MEMORY_CONSTANTS]
    outcomes = [run.outcome for run in runs if not run.peak_bytes]
    weights = {s: 1 / max(1, outcomes.count(s)) for s in ("ok", "oom")}
    engines = _minimise_all(
        starts,
        of_memory,
        lambda e: _memory_residuals(by_gpu.get(e.gpu, ()), weights, e),
        _PEAK_LOSSES if any(run.peak_bytes for run in runs) else _OUTCOME_LOSSES,
    )

    ran = _by_gpu([run for run in runs if run.ran])
    of_time = [each for each in parameters if each not in of_memory and (each.gpu in ran or each.gpu == ANY_GPU)]
    if not ran or not of_time:
        return engines
    held = {engine.gpu: engine for engine in engines}
    peaks = {
        gpu: [estimator.memory(run.layout, run.kernels) for run, estimator in _with_estimators(of_gpu, held[gpu])]
        for gpu, of_gpu in ran.items()
    }
    return _minimise_all(
        engines, of_time, lambda e: _time_residuals(ran.get(e.gpu, ()), peaks.get(e.gpu, ()), e), _TIME_LOSSES
    )


def list_parameters(engines: Sequence[Engine]) -> list[Parameter]:
    """The constants that are fitted to runs of an engine on these GPU types, those of all types first."""
    shared = dict.fromkeys(Parameter(ANY_GPU, name) for engine in engines for name in engine.shared)
    return [*shared, *(Parameter(engine.gpu, name) for engine in engines for name in engine.fitted)]


def _by_gpu(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.scenario.cluster.gpu.name, []).append(run)
    return found


def _minimise_all(
    engines: Sequence[Engine],
    parameters: Sequence[Parameter],
    residuals: Callable[[Engine], np.ndarray],
    losses: Sequence[tuple[str, float]],
) -> list[Engine]:
    """The engines with least loss of the residuals of them all; `residuals` gives those on an engine's GPU type."""
    find = cache(residuals)  # most steps change one GPU type's constants

    def apply(values: Sequence[float]) -> list[Engine]:
        given = dict(zip(parameters, values, strict=True))
        return [
            engine.with_constants(**{
                name: value for (gpu, name), value in given.items()
                if (gpu == engine.gpu and name in engine.fitted) or (gpu == ANY_GPU and name in engine.shared)
            })
            for engine in engines
        ]  # fmt: skip

    def average(parameter: Parameter, having: Sequence[Engine]) -> float:
        return float(np.mean([
            getattr(each.constants, parameter.name)
            for each in having
            if parameter.gpu in (ANY_GPU, each.gpu) and parameter.name in (*each.shared, *each.fitted)
        ]))  # fmt: skip

    unfitted = [without_fit(each) for each in engines]
    found = _find_least(
        [name for _, name in parameters],
        [average(parameter, engines) for parameter in parameters],
        lambda values: np.concatenate([find(engine) for engine in apply(values)]),
        losses,
        expected=[average(parameter, unfitted) for parameter in parameters],
    )
    return apply(found)


def minimise(
    engine: Engine, names: Sequence[str], residuals: Callable[[Engine], np.ndarray], losses: Sequence[tuple[str, float]]
) -> Engine:
    """The engine with least loss of the residuals over the named constants, as `_find_least` finds it."""
    start = [getattr(engine.constants, name) for name in names]

    def apply(values: Sequence[float]) -> Engine:
        return engine.with_constants(**dict(zip(names, values, strict=True)))

    return apply(_find_least(names, start, lambda values: residuals(apply(values)), losses))


def _find_least(
    names: Sequence[str],
    start: Sequence[float],
    residuals: Callable[[Sequence[float]], np.ndarray],
    losses: Sequence[tuple[str, float]],
    expected: Sequence[float] | None = None,
) -> list[float]:
    """Values of the named constants with least loss of the residuals, each scaled by the width of its bounds.

    Each of the losses starts where the one before ended. Constants of which the residuals don't speak are left out: the
    trust region, wider than the step that is told, would fill up with them. With `expected`, each constant that is
    fitted is pulled towards its value there (`_PULL`).
    """
    low, high = (np.array([BOUNDS[name][side] for name in names]) for side in (0, 1))
    shares = (np.array(start) - low) / (high - low)
    centre = None if expected is None else (np.array(expected) - low) / (high - low)

    def find(shares: np.ndarray) -> np.ndarray:
        return residuals(np.clip(low + shares * (high - low), low, high).tolist())

    told = _find_told(find, shares)
    if not told:
        return list(start)

    def with_told(values: np.ndarray) -> np.ndarray:
        changed = shares.copy()
        changed[told] = values
        return changed

    def find_all(values: np.ndarray) -> np.ndarray:
        found = find(with_told(values))
        return found if centre is None else np.append(found, _PULL * (values - centre[told]))

    shares = with_told(np.clip(shares[told], _FROM_END, 1 - _FROM_END))  # the first loss starts where there is a slope
    for loss, scale in losses:
        first = np.clip(shares[told], 1e-3, 1 - 1e-3)  # a later one may start close to a bound, but not on it
        found = least_squares(
            find_all, first, bounds=(0, 1), loss=loss,
            f_scale=scale, diff_step=1e-4, ftol=1e-5, xtol=1e-5, max_nfev=60,
        )  # fmt: skip
        shares = with_told(found.x)
    return [float(low[i] + shares[i] * (high[i] - low[i])) if i in told else start[i] for i in range(len(names))]


def _find_told(find: Callable[[np.ndarray], np.ndarray], shares: np.ndarray) -> list[int]:
    """Indices of the shares of which the residuals speak: with such a one at 0 or at 1 they are others than here."""
    here = find(shares)

    def at(index: int, end: float) -> np.ndarray:
        changed = shares.copy()
        changed[index] = end
        return find(changed)

    return [i for i in range(len(shares)) if any(not np.array_equal(at(i, end), here) for end in (0.0, 1.0))]


def _memory_residuals(runs: Sequence[Run], weights: Mapping[str, float], engine: Engine) -> np.ndarray:
    """Logarithms of predicted over measured peaks; for outcomes alone, the root of their logistic loss, weighted."""
    residuals = []
    for run, estimator in _with_estimators(runs, engine):
        ranks = estimator.memory(run.layout, run.kernels)
        if run.peak_bytes:
            residuals.append(np.log(ranks[0].total / run.peak_bytes))
        elif run.outcome in weights:
            distance = np.log(ranks.needed_bytes / estimator.capacity_bytes) / _MARGIN
            side = distance if run.outcome == "ok" else -distance
            residuals.append(np.sqrt(weights[run.outcome] * np.logaddexp(0, side)))
    return np.array(residuals)


def _time_residuals(runs: Sequence[Run], memory: Sequence[RankMemory], engine: Engine) -> np.ndarray:
    residuals = []
    for (run, estimator), ranks in zip(_with_estimators(runs, engine), memory, strict=True):
        step_time_s = estimator.time(run.layout, run.kernels, ranks).total
        predicted = 1 / step_time_s if run.mfu is None else estimator.mfu(step_time_s, run.layout.world_size)
        assert run.speed is not None, "only runs with a speed"
        weight = _SLOW_WEIGHT if run.mfu is not None and run.mfu < LOWEST_MFU else 1
        residuals.append(np.log(predicted / run.speed) * weight)
    return np.array(residuals)


def _with_estimators(runs: Sequence[Run], engine: Engine) -> Iterator[tuple[Run, Estimator]]:
    """Each run with an estimator of its scenario with the engine's constants; runs of one scenario share it."""
    find = cache(lambda scenario: Estimator(replace(scenario, engine=scenario.engine.with_constants_of(engine))))
    return ((run, find(run.scenario)) for run in runs)
