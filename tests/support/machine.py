"""A machine that is known to the last constant: what its steps take, and what would be measured on it."""

import random
from dataclasses import replace
from itertools import product

from dtlayout.calibrate.measured import AttentionTime, CollectiveTime, MatmulTime, Measured, ProbeTime
from dtlayout.calibrate.probes import plan_probes
from dtlayout.costmodel.comm import Link, half_all_reduce_s
from dtlayout.costmodel.engine import OWN_ENGINE, find_engine_on
from dtlayout.costmodel.estimate import estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import Precision

KERNELS = Kernels(attention="sdpa-flash")
FP32 = Precision(compute="float32")
CONTENTION = 2.0
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
        link_bytes_per_s=LINK.bytes_per_s / 0.7, gpus_per_node=4, ranks_at_once=4 / CONTENTION,
        achieved=tuple(TRUTH.items()),
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
            MatmulTime(m=m, n=n, k=k, format=name, seconds=around(CONTENTION * alone_s), alone_s=around(alone_s))
        )
    flash_s = 2 * 8 * 512**2 * 64 / (0.3 * PEAK) * CONTENTION
    attention = AttentionTime(
        kernel="sdpa-flash", batch=1, heads=8, seq_len=512, head_dim=64, format="float32",
        forward_s=flash_s, backward_s=2.5 * flash_s,
    )  # fmt: skip
    collectives = []
    for kind, n, size in product(("all-reduce", "all-gather", "reduce-scatter"), (2, 4), (2**12, 2**16, 2**20, 2**22)):
        seconds = (2 if kind == "all-reduce" else 1) * half_all_reduce_s(size, n, LINK)
        collectives.append(
            CollectiveTime(kind=kind, num_ranks=n, stride=1, size_bytes=size, crosses_nodes=False,
                           seconds=around(CONTENTION * seconds))
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
        memory_bytes=2**32, steal=0.0, stream_bytes_per_s=STREAM / CONTENTION, host_s=2e-3 * CONTENTION,
        host_alone_s=2e-3,
        matmuls=tuple(matmuls), attention=(attention,), collectives=tuple(collectives), probes=tuple(probes),
    )  # fmt: skip


GPU_LINK, NETWORK, TP_NETWORK = (
    Link(200e9, 50e-6, 4e-6, crosses_nodes=False),
    Link(20e9, 0.0, 15e-6, crosses_nodes=True),
    Link(60e9, 0.0, 30e-6, crosses_nodes=True),
)
"""Of two nodes with H100s: inside, a ring with one rank a node, and one through all ranks of both."""


def measure_gpus() -> Measured:
    """What two nodes of four H100s would measure, whose ranks share nothing: matmuls reach 0.7 of the peak."""
    h100, collectives = find_gpu("h100-80g-sxm"), []
    for kind, (n, stride, link), size in product(
        ("all-reduce", "all-gather", "reduce-scatter", "message"),
        ((2, 1, GPU_LINK), (4, 1, GPU_LINK), (2, 4, NETWORK), (8, 1, TP_NETWORK)),
        (2**16, 2**20, 2**24, 2**28),
    ):
        halves = 2 if kind == "all-reduce" else 1
        seconds = halves * half_all_reduce_s(size, n, link)
        if kind == "message":
            seconds = 2 * (size / (link.bytes_per_s / 2) + link.latency_s)
        collectives.append(
            CollectiveTime(kind=kind, num_ranks=n, stride=stride, size_bytes=size, crosses_nodes=link.crosses_nodes,
                           seconds=seconds)
        )  # fmt: skip
    seconds = {(n, k): 2 * 4096 * n * k / (0.7 * h100.peak_flops_per_s) for n, k in ((4096, 4096), (8192, 4096))}
    flash_s = 2 * 32 * 8192**2 * 128 / (0.4 * h100.peak_flops_per_s)
    measured = measure_machine()
    cluster = Cluster(gpu=replace(h100, achieved=(("layer_host_s", 2e-3), ("step_host_s", 1e-2))), num_gpus=8,
                      gpus_per_node=4)  # fmt: skip
    bf16 = Precision()
    probes = []
    for layout in (Layout(dp_shard=8), Layout(dp_shard=8, recompute="full"), Layout(dp_shard=4, pp=2)):
        for num_layers, m in ((4, 2), (8, 2), (8, 4)):
            model = replace(measured.probes[0].model, num_layers=num_layers)
            batch = Batch(global_batch=layout.dp * m, seq_len=16)
            engine = find_engine_on(OWN_ENGINE, cluster.gpu)
            scenario = Scenario(model=model, batch=batch, cluster=cluster, engine=engine, precision=bf16)
            step = estimate(scenario, layout, KERNELS).step_time_s
            probes.append(
                ProbeTime(model=model, batch=batch, layout=layout, kernels=KERNELS, precision=bf16, seconds=step)
            )
    return replace(
        measured,
        device=h100.device_names[0], gpu=h100.name, num_ranks=8, ranks_per_node=4, memory_bytes=h100.memory_bytes,
        stream_bytes_per_s=0.9 * h100.memory_bytes_per_s, host_s=2.1e-3, host_alone_s=2e-3,
        matmuls=tuple(
            MatmulTime(m=4096, n=n, k=k, format="bfloat16", seconds=1.05 * alone_s, alone_s=alone_s)
            for (n, k), alone_s in seconds.items()
        ),
        attention=(
            AttentionTime(kernel="sdpa-flash", batch=1, heads=32, seq_len=8192, head_dim=128, format="bfloat16",
                          forward_s=flash_s, backward_s=2.5 * flash_s),
        ),
        collectives=tuple(collectives),
        probes=tuple(probes),
    )  # fmt: skip
