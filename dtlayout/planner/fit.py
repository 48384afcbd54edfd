"""Fit: an engine's constants on one GPU type, from runs that were measured.

Memory comes first, since nothing of it depends on speed: peaks where they were measured, and on which side of the
capacity a run fell where only that is known. Then speed: the logarithm of predicted over measured step time. Its loss
(Cauchy's) grows as the logarithm of the error, for some runs stall for reasons outside any model, and constants that
followed those would move with every run that is left out. Every constant stays inside its bounds
(`costmodel.engine.Constants`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from scipy.optimize import least_squares

from dtlayout.costmodel.engine import BOUNDS, Engine
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.memory import MemoryEstimate
from dtlayout.errors import DtlayoutError
from dtlayout.planner.runs import Run
from dtlayout.planner.scores import LOWEST_MFU

MEMORY_CONSTANTS = frozenset({
    "score_saved_bytes", "fused_score_saved_bytes", "flash1_saved_bytes", "norm_saved_bytes", "block_saved_bytes",
    "logit_bytes", "gathered_logit_bytes", "overhead_bytes", "context_bytes", "run_ahead_bytes", "message_saved_bytes",
    "run_ahead_microbatches", "run_ahead_host_s",
})  # fmt: skip
"""Constants of memory; the others are of time."""

_MARGIN = 0.02
"""Relative distance from the capacity at which a run's outcome is no longer a matter of chance."""
_TIME_LOSSES = (("soft_l1", 0.02), ("cauchy", 0.02))
"""Losses of a step time, one fit after the other, each with the relative error from which on it grows slower than the
square; the last is blind to runs that are far off, so it must not come first."""
_MEMORY_LOSSES = (("soft_l1", 0.01),)
"""The loss of a peak: none is far off for no reason."""
_SLOW_WEIGHT = 0.3
"""Weight of runs below the lowest MFU that is scored."""


def refit(runs: Sequence[Run], start: Engine) -> Engine:
    """The engine with the constants fitted that its file names for its GPU type, starting at those it has."""
    name, gpu = start.name, start.gpu
    if not start.fitted:
        raise DtlayoutError(
            f"engine {name} has no constants to fit on {gpu}: its file has no [fitted.{gpu}], nor are there any "
            f"of dtlayout calibrate"
        )
    runs = [run for run in runs if run.scenario.engine.name == name and run.scenario.cluster.gpu.name == gpu]
    ran = [run for run in runs if run.ran]
    if not ran:
        raise DtlayoutError(f"no run of engine {name} on {gpu} to fit to")
    memory_names = [name for name in start.fitted if name in MEMORY_CONSTANTS]
    time_names = [name for name in start.fitted if name not in MEMORY_CONSTANTS]
    engine = minimise(start, memory_names, lambda e: _memory_residuals(runs, e), _MEMORY_LOSSES)
    peaks = [estimator.memory(run.layout, run.kernels) for run, estimator in _with_estimators(ran, engine)]
    return minimise(engine, time_names, lambda e: _time_residuals(ran, peaks, e), _TIME_LOSSES)


def minimise(
    engine: Engine, names: Sequence[str], residuals: Callable[[Engine], np.ndarray], losses: Sequence[tuple[str, float]]
) -> Engine:
    """The engine with least loss of the residuals over the named constants, each scaled by the width of its bounds.

    Each of the losses starts where the one before ended.
    """
    if not names:
        return engine
    low, high = (np.array([BOUNDS[name][side] for name in names]) for side in (0, 1))

    def apply(shares: np.ndarray) -> Engine:
        values = np.clip(low + shares * (high - low), low, high).tolist()
        return engine.with_constants(**dict(zip(names, values, strict=True)))

    start = (np.array([getattr(engine.constants, name) for name in names]) - low) / (high - low)
    for loss, scale in losses:
        start = np.clip(start, 1e-3, 1 - 1e-3)
        found = least_squares(
            lambda shares: residuals(apply(shares)), start, bounds=(0, 1), loss=loss, f_scale=scale,
            diff_step=1e-4, ftol=1e-5, xtol=1e-5, max_nfev=60,
        )  # fmt: skip
        start = found.x
    return apply(start)


def _memory_residuals(runs: Sequence[Run], engine: Engine) -> np.ndarray:
    """Logarithms of predicted over measured peaks; for outcomes alone, the root of their logistic loss."""
    outcomes = [run.outcome for run in runs if not run.peak_bytes]
    weights = {s: 1 / max(1, outcomes.count(s)) for s in ("ok", "oom")}
    residuals = []
    for run, estimator in _with_estimators(runs, engine):
        ranks = estimator.memory(run.layout, run.kernels)
        if run.peak_bytes:
            residuals.append(np.log(ranks[0].total / run.peak_bytes))
        elif run.outcome in weights:
            distance = np.log(max(rank.total for rank in ranks) / estimator.capacity_bytes) / _MARGIN
            side = distance if run.outcome == "ok" else -distance
            residuals.append(np.sqrt(weights[run.outcome] * np.logaddexp(0, side)))
    return np.array(residuals)


def _time_residuals(runs: Sequence[Run], memory: Sequence[tuple[MemoryEstimate, ...]], engine: Engine) -> np.ndarray:
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
    find = cache(lambda scenario: Estimator(replace(scenario, engine=engine)))
    return ((run, find(run.scenario)) for run in runs)
