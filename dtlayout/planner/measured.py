"""Measured: a step's measured time beside the predicted one, and what alone would explain the difference.

Each cause is one speed of the machines. It is made slower until the predicted step takes as long as the measured one;
what overlaps is counted as in any prediction. A cause that does not get there, however slow, is named as none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from math import inf, sqrt
from typing import Literal

from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.engine_constants import BOUNDS, Constants
from dtlayout.costmodel.estimate import Estimate, estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.planner.verdicts import name_parts
from dtlayout.records.intervals import Interval, find_intervals
from dtlayout.spec.cluster import Gpu

_SLOWEST = 1000.0
"""Largest factor by which a speed is divided."""
_NEAR = 0.01
"""Share of the measured step up to which a prediction has met it."""
FULL = 0.92
"""Share of a GPU's memory from which a full allocator may be the cause: it frees and asks again."""


@dataclass(frozen=True)
class Cause:
    """A speed that would explain a slow step by itself."""

    name: str
    """Name of the speed, such as network."""
    meaning: str
    """Words for the speed and its predicted value."""
    factor: float
    """Factor by which it would have to be slower; infinite where even `_SLOWEST` is not enough."""
    step_time_s: float
    """Seconds of a step with it so slow."""
    part: str
    """Part of the step that grows most then, in words."""
    part_s: float
    """Seconds of that part."""
    part_before_s: float
    """Seconds of that part as predicted."""


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step beside its prediction."""

    measured_s: float
    predicted_s: float
    interval: Interval
    """Range of measured values, as multiples of the predicted one."""
    place: Literal["inside", "slower", "faster"]
    """Place beside that range."""
    causes: tuple[Cause, ...]
    """Causes of a step that is slower than predicted, the smallest factor first; empty for another one."""
    is_full: bool
    """True where the fullest rank is predicted to fill so much of its memory that the allocator may be the cause."""

    @property
    def lost_s(self) -> float:
        """Seconds by which the measured step is longer."""
        return self.measured_s - self.predicted_s


def judge(scenario: Scenario, now: Estimate, measured_s: float) -> MeasuredStep:
    """A measured step of a layout beside its prediction."""
    interval = find_intervals(scenario).step_time
    low_s, high_s = interval.around(now.step_time_s)
    place: Literal["inside", "slower", "faster"] = "inside"
    if not low_s <= measured_s <= high_s:
        place = "slower" if measured_s > high_s else "faster"
    is_slower = measured_s > (1 + _NEAR) * now.step_time_s
    causes = sorted(_find_causes(scenario, now, measured_s), key=lambda each: each.factor) if is_slower else []
    is_full = now.peak_bytes > FULL * now.capacity_bytes
    return MeasuredStep(measured_s, now.step_time_s, interval, place, tuple(causes), is_full and is_slower)


def _find_causes(scenario: Scenario, now: Estimate, measured_s: float) -> Iterator[Cause]:
    names, before = name_parts(now.layout), now.time.as_dict()
    for name, meaning, slow_down in _list_speeds(scenario, now):

        def predict(factor: float, slow_down: Callable[[float], Scenario] = slow_down) -> Estimate:
            return estimate(slow_down(factor), now.layout, now.kernels)

        factor, slowed = _solve(predict, measured_s)
        if slowed.step_time_s > (1 + _NEAR) * now.step_time_s:
            after = slowed.time.as_dict()
            part = max(after, key=lambda each: after[each] - before[each])
            yield Cause(name, meaning, factor, slowed.step_time_s, names[part], after[part], before[part])


def _solve(predict: Callable[[float], Estimate], wanted_s: float) -> tuple[float, Estimate]:
    """The factor at which a step takes `wanted_s`, and the step there; infinity and the longest step if none does."""
    low, high, longest = 1.0, _SLOWEST, predict(_SLOWEST)
    if longest.step_time_s < wanted_s:
        return inf, longest
    while high / low > 1 + _NEAR / 2:
        middle = sqrt(low * high)
        low, high = (middle, high) if predict(middle).step_time_s < wanted_s else (low, middle)
    return high, predict(high)


def _list_speeds(scenario: Scenario, now: Estimate) -> Iterator[tuple[str, str, Callable[[float], Scenario]]]:
    """Name and meaning of each speed that may be the cause, and the scenario where it is so many times slower."""
    gpu, cluster, layout = scenario.cluster.gpu, scenario.cluster, now.layout

    def change(*names: str) -> Callable[[float], Scenario]:
        def slow_down(factor: float) -> Scenario:
            slower = {name: speed / factor for name in names if (speed := getattr(gpu, name)) is not None}
            return replace(scenario, cluster=replace(cluster, gpu=replace(gpu, **slower)))

        return slow_down

    if layout.world_size > cluster.gpus_per_node:
        meaning = f"network between nodes, {gpu.network_bytes_per_s / 1e9:.0f} GB/s a GPU"
        yield "network", meaning, change("network_bytes_per_s")
    if layout.world_size > 1:
        yield "links", f"links inside a node, {gpu.link_bytes_per_s / 1e9:.0f} GB/s a GPU", change("link_bytes_per_s")
    peaks = [f.name for f in fields(Gpu) if f.name.startswith("peak_") and f.name.endswith("flops_per_s")]
    yield "matmuls", f"matmuls, of {gpu.peak_flops_per_s / 1e12:.0f} TFLOP/s at the peak in bf16", change(*peaks)
    yield "memory", f"the GPU's memory, {gpu.memory_bytes_per_s / 1e12:.1f} TB/s", change("memory_bytes_per_s")
    yield "host", "the host, which starts kernels", lambda factor: _slow_host(scenario, factor)


def _slow_host(scenario: Scenario, factor: float) -> Scenario:
    """The scenario where the host takes so many times as long for everything, up to the bounds of its constants."""
    constants = scenario.engine.constants
    names = [f.name for f in fields(Constants) if f.name.endswith("_s") and "host" in f.name]
    slower = {name: min(factor * getattr(constants, name), BOUNDS[name][1]) for name in names}
    return replace(scenario, engine=scenario.engine.with_constants(**slower))


def parse_measured(text: str, scenario: Scenario, now: Estimate) -> float:
    """Seconds of a step from tokens/s/GPU (1234), a step's seconds (12.3s, 850ms) or an MFU (41%).

    InvalidConfig for another text. The MFU is that of model FLOPs, as predictions have it.
    """
    number, unit = text.strip(), ""
    for ending in ("ms", "s", "%"):
        if number.endswith(ending):
            number, unit = number[: -len(ending)], ending
            break
    try:
        value = float(number.replace(",", ""))
    except ValueError:
        value = 0.0
    if not 0 < value < inf or (unit == "%" and value >= 100):
        raise InvalidConfig(f"--measured {text} is no speed; write 1234 (tokens/s/GPU), 12.3s (a step) or 41% (MFU)")
    if unit == "%":
        if not scenario.cluster.gpu.has_mfu:
            raise InvalidConfig(
                f"--measured {text}: no MFU is known of {scenario.cluster.gpu.name}; write a step's time"
            )
        return now.mfu * now.step_time_s / (value / 100)
    if unit:
        return value / (1000 if unit == "ms" else 1)
    return scenario.batch.num_tokens / (value * now.layout.world_size)
