"""What the host takes of a layer, measured as benchmarks/host_time.py does."""

from benchmarks.gpu.cells import HostTime
from benchmarks.gpu.rows import HostTimes
from benchmarks.host_time import measure_host_s
from dtlayout.spec.device import Device


def measure_host(cell: HostTime, device: Device) -> HostTimes:
    """Seconds of one layer of one microbatch, forward and backward."""
    return HostTimes(layer_s=measure_host_s(cell.tp, cell.compile, device.type))
