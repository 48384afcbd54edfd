"""Calibration: measurements of `dtlayout calibrate`, and the constants that follow from all rows.

Kernels are read off their own measurements and the host's times are fitted to small steps, as `dtlayout calibrate`
does. The host's time of a layer under tp comes from the rank of a fake group, and passes over memory, which nothing
measures alone, from the steps that trained.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.gpu.cells import Calibration, HostTime
from benchmarks.gpu.predict import predict
from benchmarks.gpu.rows import HostTimes, Row, find_trained
from dtlayout.base.errors import InvalidConfig
from dtlayout.calibrate.measured import Measured
from dtlayout.calibrate.ranks import measure
from dtlayout.costmodel.engine import OWN_ENGINE, Engine, find_engine_on
from dtlayout.costmodel.engine_constants import BOUNDS
from dtlayout.spec.cluster import Cluster
from dtlayout.spec.device import Device

PACKAGES = ("scipy", "tomli_w")
"""Packages that fitting and writing constants need."""
_FROM_STEPS = ("width_traffic_bytes", "logit_traffic_bytes", "norm_traffic_bytes")
"""Constants that nothing measures alone; on a CPU the small steps tell some of them."""
_LOSSES = (("soft_l1", 0.05),)


def measure_calibration(_: Calibration, device: Device) -> Measured:
    """All that one rank can measure."""
    if device.gpu is None:
        raise InvalidConfig("no numbers of this GPU are known, of which constants are shares")
    return measure(device, device.gpu, ranks_per_node=1)


def find_measured(rows: Iterable[Row]) -> Measured | None:
    """The calibration that was measured last; None if there is none."""
    return next((row.measured for row in reversed([*rows]) if isinstance(row.measured, Measured)), None)


def derive(measured: Measured, rows: Sequence[Row]) -> Cluster:
    """The machine as predictions take it: constants of the cost model in `gpu.achieved`."""
    from dtlayout.calibrate.fit import calibrate  # which needs scipy
    from dtlayout.validation.fit import minimise

    cluster = calibrate(measured).cluster
    achieved = dict(cluster.gpu.achieved) | dict(_read_host(rows))
    engine = find_engine_on(OWN_ENGINE, replace(cluster.gpu, achieved=tuple(achieved.items())))
    trained = [(cell, measured.step_time_s) for cell, measured, _ in find_trained(rows)]

    def compare(engine: Engine) -> np.ndarray:
        return np.log([predict(cell, cluster.gpu, engine).step_time_s / seconds for cell, seconds in trained])

    names = [name for name in _FROM_STEPS if name not in achieved] if len(trained) > len(_FROM_STEPS) else []
    engine = minimise(engine, names, compare, _LOSSES)
    achieved |= {name: getattr(engine.constants, name) for name in names}
    return replace(cluster, gpu=replace(cluster.gpu, achieved=tuple(sorted(achieved.items()))))


def _read_host(rows: Iterable[Row]) -> Iterator[tuple[str, float]]:
    """Constants from the host's times under tp; without it the probes tell."""
    for row in rows:
        is_eager = isinstance(row.cell, HostTime) and row.cell.tp > 1 and row.cell.compile == "none"
        if is_eager and isinstance(row.measured, HostTimes):
            yield "layer_host_tp_s", float(np.clip(row.measured.layer_s, *BOUNDS["layer_host_tp_s"]))
