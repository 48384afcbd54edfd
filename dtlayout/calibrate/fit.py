"""Fit: numbers and constants from measurements, with which the cost model predicts these machines.

Each kernel and link has measurements of its own, from which its speed is read. The host's times are fitted to the
probes, all at once, since every step has a little of each. Times are those of a rank alone: times that were measured
while all ranks were at work are divided by their contention. The cost model multiplies by it again where ranks run
together.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import nnls

from dtlayout.calibrate.measured import CollectiveTime, Measured, ProbeTime
from dtlayout.costmodel.engine import OWN_ENGINE, Engine, find_engine_on
from dtlayout.costmodel.engine_constants import BOUNDS, Constants
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.scenario import Scenario
from dtlayout.spec.cluster import Cluster, Gpu, find_gpu
from dtlayout.spec.kernel_records import AttentionKernel
from dtlayout.spec.kernel_table import find_kernel
from dtlayout.spec.layout import Layout
from dtlayout.spec.recompute import Recompute
from dtlayout.validation.fit import minimise

_FROM_PROBES = {
    "cpu": (
        "layer_host_s", "layer_host_tp_s", "full_host_s", "full_host_tp_s", "selective_host_s", "selective_host_tp_s",
        "head_host_s", "message_host_s", "layer_sync_s", "layer_update_s", "step_host_s", "matmul_efficiency",
        "width_traffic_bytes", "logit_traffic_bytes",
    ),
    "cuda": ("layer_host_s", "layer_host_tp_s", "full_host_s", "full_host_tp_s", "selective_host_s",
             "selective_host_tp_s", "step_host_s"),
}  # fmt: skip
"""Device → constants of the cost model that steps of the trainer determine."""
_LOSSES = (("soft_l1", 0.05),)
_FILLS = range(0, 257, 8)
_SHARED = 0.9
"""Ranks are said to share a node's cores if less than this fraction of them runs at full speed."""


@dataclass(frozen=True)
class Calibration:
    """Result of a fit to measurements: the machines as predictions take them, and the remaining errors."""

    cluster: Cluster
    """The measured machines: numbers in `gpu`, constants of the cost model in `gpu.achieved`."""
    errors: tuple[float, ...]
    """Predicted over measured step of each probe, less 1."""

    @property
    def error(self) -> float:
        """Median size of the errors."""
        return median(map(abs, self.errors)) if self.errors else math.nan


def calibrate(measured: Measured) -> Calibration:
    """The calibrated cluster for these measurements."""
    sheet = find_gpu(measured.gpu)
    at_once = measured.ranks_per_node / measured.contention
    is_contended = at_once < _SHARED * measured.ranks_per_node
    contention = measured.contention if is_contended else 1.0
    kernels, links = _read_kernels(measured, sheet, contention), _read_links(measured, sheet, contention)
    numbers: dict[str, Any] = kernels[0] | links[0] | {"ranks_at_once": at_once if is_contended else math.inf}
    achieved = {name: float(np.clip(value, *BOUNDS[name])) for name, value in (kernels[1] | links[1]).items()}
    gpu = replace(sheet, memory_bytes=measured.memory_bytes, gpus_per_node=measured.ranks_per_node, **numbers)
    cluster = Cluster(gpu=gpu, num_gpus=measured.num_ranks, gpus_per_node=measured.ranks_per_node)
    names = identifiable_constants([probe.layout for probe in measured.probes], gpu.device_type)
    engine = find_engine_on(OWN_ENGINE, gpu).with_constants(**achieved)
    residuals = [_compare(probe, cluster, engine) for probe in measured.probes]
    engine = minimise(engine, names, lambda e: np.array([residual(e) for residual in residuals]), _LOSSES)
    achieved |= {name: getattr(engine.constants, name) for name in names}
    errors = tuple(math.expm1(residual(engine)) for residual in residuals)
    return Calibration(replace(cluster, gpu=replace(gpu, achieved=tuple(sorted(achieved.items())))), errors)


def _read_kernels(measured: Measured, sheet: Gpu, contention: float) -> tuple[dict[str, float], dict[str, float]]:
    """Numbers of the GPU and constants of the cost model for matmuls, attention and memory.

    A GPU has a data sheet, and its kernels reach a share of those numbers. A CPU has none: its peak is the speed of
    matmuls by themselves. Matmuls in a step, whose results lie in new memory each time, reach a share of that.
    """
    general = Constants()
    numbers: dict[str, float] = {}
    achieved: dict[str, float] = {}
    speeds = {name: _fit_matmuls(measured, name) for name in dict.fromkeys(each.format for each in measured.matmuls)}
    stream = measured.stream_bytes_per_s * contention
    sheet_peak = sheet.peak_flops_per_s
    if "float16" in speeds and sheet.peak_fp16_flops_per_s is not None:
        sheet_peak = sheet.peak_fp16_flops_per_s
    if sheet.device_type == "cpu":
        numbers = {
            "peak_flops_per_s": speeds["bfloat16"][0],
            "peak_fp32_flops_per_s": speeds["float32"][0],
            "memory_bytes_per_s": stream / general.memory_efficiency,
        }
        achieved["matmul_fill"] = speeds["float32"][1]
    else:
        (name,) = speeds  # of 16 bits
        achieved["matmul_efficiency"] = speeds[name][0] / sheet_peak
        achieved["matmul_fill"] = speeds[name][1]
        achieved["memory_efficiency"] = stream / sheet.memory_bytes_per_s
    for kernel in dict.fromkeys(each.kernel for each in measured.attention):
        times = [each for each in measured.attention if each.kernel == kernel]
        # Half of the scores is masked, and both directions together do 3.5 times the FLOPs of forward.
        flops = sum(3.5 * 2 * t.batch * t.heads * t.seq_len**2 * t.head_dim for t in times)
        alone_s = sum(t.forward_s + t.backward_s for t in times) / contention
        peak = speeds[times[0].format][0] if sheet.device_type == "cpu" else sheet_peak
        achieved[find_kernel(AttentionKernel, kernel).efficiency] = flops / alone_s / peak
    return numbers, achieved


def _fit_matmuls(measured: Measured, name: str) -> tuple[float, float]:
    """FLOP/s of a rank alone, and the fill, that come nearest to all matmuls of a format."""
    times = [each for each in measured.matmuls if each.format == name]

    def fit(fill: int) -> tuple[float, float, float]:
        logs = [math.log(2 * (t.m + fill) * (t.n + fill) * (t.k + fill) / t.alone_s) for t in times]
        middle = median(logs)
        return sum(abs(log - middle) for log in logs), math.exp(middle), float(fill)

    return min(map(fit, _FILLS))[1:]


def _read_links(measured: Measured, sheet: Gpu, contention: float) -> tuple[dict[str, float], dict[str, float]]:
    """Numbers of the GPU and constants of the cost model for links inside a node, and between nodes."""
    general = Constants()
    inside = [each for each in measured.collectives if not each.crosses_nodes]
    across = [each for each in measured.collectives if each.crosses_nodes]
    numbers: dict[str, float] = {}
    achieved: dict[str, float] = {}
    if inside:
        start_s, bytes_per_s, latency_s = _fit_link([t for t in inside if t.kind != "message"], contention)
        if sheet.device_type == "cpu":
            numbers["link_bytes_per_s"] = bytes_per_s / general.link_efficiency
        else:
            achieved["link_efficiency"] = bytes_per_s / sheet.link_bytes_per_s
        achieved |= {"collective_start_s": start_s, "link_latency_s": latency_s}
    if across:
        # One rank a node, like dp's rings; several of a node together, like tp's; and the messages of pipelines.
        rings = [t for t in across if t.kind != "message" and t.stride * t.num_ranks > measured.ranks_per_node]
        apart = [t for t in rings if t.stride >= measured.ranks_per_node] or rings
        start_s, bytes_per_s, latency_s = _fit_link(apart, contention)
        numbers["network_bytes_per_s"] = bytes_per_s / general.network_efficiency
        numbers["network_latency_s"] = max(1e-6, latency_s + start_s)
        together = [t for t in rings if t.stride == 1 and t.num_ranks > measured.ranks_per_node]
        if together:
            start_s, bytes_per_s, latency_s = _fit_link(together, contention)
            of_node = measured.ranks_per_node * numbers["network_bytes_per_s"]
            achieved["tp_network_efficiency"] = bytes_per_s / of_node
            achieved["tp_network_latency_s"] = latency_s + start_s
        messages = [t for t in across if t.kind == "message" and t.stride >= measured.ranks_per_node]
        if messages:
            _, bytes_per_s, _ = _fit_link(messages, contention=1.0)  # a rank that waits for a message uses no core
            achieved["message_efficiency"] = bytes_per_s / numbers["network_bytes_per_s"]
    elif inside and sheet.device_type == "cpu":  # one node: a link between nodes would be the same
        numbers["network_bytes_per_s"] = numbers["link_bytes_per_s"]
        numbers["network_latency_s"] = max(1e-6, achieved["link_latency_s"])
    return numbers, achieved


def _fit_link(times: Sequence[CollectiveTime], contention: float) -> tuple[float, float, float]:
    """Start seconds, bytes per second and latency per hop that come nearest to collectives, by relative error.

    An all-reduce counts as two halves (`costmodel.comm`), a message there and back as two hops.
    """
    rows = []
    for t in times:
        halves = 2 if t.kind in ("all-reduce", "message") else 1
        moved = t.size_bytes if t.kind == "message" else t.size_bytes * (t.num_ranks - 1) / t.num_ranks
        hops = 1 if t.kind == "message" else t.num_ranks - 1
        rows.append([halves * part * contention / t.seconds for part in (1.0, moved, float(hops))])
    (start_s, s_per_byte, latency_s), _ = nnls(np.array(rows), np.ones(len(rows)))
    return float(start_s), 1 / max(float(s_per_byte), 1e-15), float(latency_s)


def identifiable_constants(layouts: Sequence[Layout], device_type: str) -> tuple[str, ...]:
    """Constants of the cost model that can be fitted to steps with these layouts."""
    parsed = [(layout.tp > 1, Recompute.parse(layout.recompute)) for layout in layouts]
    recomputed = {(is_tp, kind.is_selective) for is_tp, kind in parsed if kind.covers(0)}
    tells = {
        "layer_host_s": any(layout.tp == 1 for layout in layouts),
        "layer_host_tp_s": any(layout.tp > 1 for layout in layouts),
        "full_host_s": (False, False) in recomputed,
        "full_host_tp_s": (True, False) in recomputed,
        "selective_host_s": (False, True) in recomputed,
        "selective_host_tp_s": (True, True) in recomputed,
        "message_host_s": any(layout.pp > 1 for layout in layouts),
        "layer_sync_s": any(layout.dp > 1 for layout in layouts),
    }
    return tuple(name for name in _FROM_PROBES[device_type] if tells.get(name, True))


def _compare(probe: ProbeTime, cluster: Cluster, engine: Engine) -> Callable[[Engine], float]:
    """Engine → logarithm of predicted over measured seconds of a probe's step."""
    here = Scenario(model=probe.model, batch=probe.batch, cluster=cluster, engine=engine, precision=probe.precision)
    memory = Estimator(here).memory(probe.layout, probe.kernels)  # it depends on no constant of time

    def residual(engine: Engine) -> float:
        estimator = Estimator(replace(here, engine=engine))
        return math.log(estimator.time(probe.layout, probe.kernels, memory).total / probe.seconds)

    return residual
