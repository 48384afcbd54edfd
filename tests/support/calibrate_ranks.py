"""A rank of a short calibration: everything once, of few sizes. torchrun calibrate_ranks.py MEASURED.json FOLDER"""

import sys
from itertools import islice

from dtlayout.base.process import leave
from dtlayout.calibrate import clock, disk, measures, probes, ranks
from dtlayout.mesh import build


def main() -> int:
    """Measure less than `dtlayout.calibrate.ranks` does, in its way."""
    clock._LEAST_S = 0.005
    measures._TOKENS = {"cpu": (64,)}
    measures._ATTENTION = {"cpu": ((1, 2, 64, 32),)}
    measures._STREAMED_BYTES = {"cpu": 2**20}
    measures._COLLECTIVE_BYTES = {"cpu": (2**12, 2**20)}
    disk.NODE_BYTES = 2**20
    probes._ROUNDS, probes._WARM_UP_STEPS, probes._STEPS = 1, 1, 2
    plan = probes.plan_probes
    probes.plan_probes = lambda world, device_type: [*islice(plan(world, device_type), 0, None, 4)]
    init, degrees = build.init_device_mesh, []
    build.init_device_mesh = lambda device, sizes, **names: degrees.append(sizes) or init(device, sizes, **names)
    exit_code = ranks.main(sys.argv[1:])
    assert degrees and all(degrees.count(each) == 1 for each in degrees), "each mesh costs process groups, which stay"
    return exit_code


if __name__ == "__main__":
    leave(main())
