"""A machine that is known to the last constant: what its steps take, and what would be measured on it."""

import random
from dataclasses import replace
from itertools import product

from dtlayout.batch import Batch
from dtlayout.calibrate.measured import AttentionTime, CollectiveTime, MatmulTime, Measured, ProbeTime
from dtlayout.calibrate.probes import plan_probes
from dtlayout.cluster import Cluster, find_gpu
from dtlayout.costmodel.comm import Link, half_all_reduce_s
from dtlayout.costmodel.engine import OWN_ENGINE, find_engine_on
from dtlayout.costmodel.estimate import estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.model_shape import ModelShape
from dtlayout.precision import Precision

KERNELS = Kernels(attention="sdpa-flash")
FP32 = Precision(compute="float32")
CROWDING = 2.0
PEAK, FILL, STREAM = 100e9, 16.0, 8e9
LINK = Link(1e9, 3e-4, 2e-4, crosses_nodes=False)
TRUTH = {
    "layer_host_s": 5e-3, "layer_host_tp_s": 40e-3, "full_host_s": 3e-3, "full_host_tp_s": 15e-3,
    "selective_host_s": 12e-3, "selective_host_tp_s": 35e-3, "head_host_s": 2e-3, "message_host_s": 1e-3,
    "layer_sync_s": 4e-3, "layer_update_s": 2e-3, "step_host_s": 10e-3, "matmul_efficiency": 0.6,
    "width_traffic_bytes": 300.0, "logit_traffic_bytes": 120.0, "matmul_fill": FILL,
    "flash2_efficiency": 0.3,
    "collective_start_s": LINK.start_s, "link_latency_s": LINK.latency_s,
}  # fmt: skip
MACHINE = Cluster(
    gpu=replace(
        find_gpu("cpu"), peak_flops_per_s=PEAK / 4, peak_fp32_flops_per_s=PEAK, memory_bytes_per_s=STREAM / 0.85,
        link_bytes_per_s=LINK.bytes_per_s / 0.7, gpus_per_node=4, ranks_at_once=4 / CROWDING,
        reached=tuple(TRUTH.items()),
    ),
    num_gpus=4,
    gpus_per_node=4,
)  # fmt: skip


def step_s(model: ModelShape, batch: Batch, layout: Layout, cluster: Cluster = MACHINE) -> float:
    engine = find_engine_on(OWN_ENGINE, cluster.gpu)
    scenario = Scenario(model=model, batch=batch, cluster=cluster, engine=engine, precision=FP32)
    return estimate(scenario, layout, KERNELS).step_time_s


def measure_machine(noise: float = 0.0) -> Measured:
    """What `dtlayout.calibrate.ranks` would measure on MACHINE, each time with an error."""
    chance = random.Random(0)

    def around(seconds: float) -> float:
        return seconds * chance.lognormvariate(0, noise)

    matmuls = []
    for name, m, (n, k) in product(("float32", "bfloat16"), (64, 256, 1024), ((128, 128), (1536, 512))):
        peak = PEAK if name == "float32" else PEAK / 4
        alone_s = 2 * (m + FILL) * (n + FILL) * (k + FILL) / peak
        matmuls.append(
            MatmulTime(m=m, n=n, k=k, format=name, seconds=around(CROWDING * alone_s), alone_s=around(alone_s))
        )
    flash_s = 2 * 8 * 512**2 * 64 / (0.3 * PEAK) * CROWDING
    attention = AttentionTime(
        kernel="sdpa-flash", batch=1, heads=8, seq_len=512, head_dim=64, format="float32",
        forward_s=flash_s, backward_s=2.5 * flash_s,
    )  # fmt: skip
    collectives = []
    for kind, n, size in product(("all-reduce", "all-gather", "reduce-scatter"), (2, 4), (2**12, 2**16, 2**20, 2**22)):
        seconds = (2 if kind == "all-reduce" else 1) * half_all_reduce_s(size, n, LINK)
        collectives.append(
            CollectiveTime(kind=kind, num_ranks=n, stride=1, size_bytes=size, crosses_nodes=False,
                           seconds=around(CROWDING * seconds))
        )  # fmt: skip
    probes = []
    for model, layout, seq_len, m in plan_probes(4, "cpu"):
        batch = Batch(global_batch=layout.dp * layout.micro_batch * m, seq_len=seq_len)
        seconds = around(step_s(model, batch, layout))
        probes.append(
            ProbeTime(model=model, batch=batch, layout=layout, kernels=KERNELS, precision=FP32, seconds=seconds)
        )
    return Measured(
        device="cpu", gpu="cpu", torch="2.13.0", date="2026-01-01", num_ranks=4, ranks_per_node=4,
        memory_bytes=2**32, taken=0.0, stream_bytes_per_s=STREAM / CROWDING, host_s=2e-3 * CROWDING, host_alone_s=2e-3,
        matmuls=tuple(matmuls), attention=(attention,), collectives=tuple(collectives), probes=tuple(probes),
    )  # fmt: skip
