"""What is read off measurements that a known machine would give is that machine."""

import random
from dataclasses import replace
from itertools import product

import pytest

from dtlayout.batch import Batch
from dtlayout.calibrate.file import to_toml
from dtlayout.calibrate.fit import calibrate
from dtlayout.calibrate.measured import AttentionTime, CollectiveTime, MatmulTime, Measured, ProbeTime
from dtlayout.calibrate.probes import plan_probes
from dtlayout.cluster import Cluster, find_gpu, load_cluster
from dtlayout.costmodel.comm import Link, all_reduce_s, half_all_reduce_s
from dtlayout.costmodel.engine import OWN_ENGINE, find_engine_on
from dtlayout.costmodel.estimate import estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.errors import InvalidConfig
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
    "width_traffic_bytes": 300.0, "logit_traffic_bytes": 120.0, "matmul_fill": FILL, "flash2_efficiency": 0.3,
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


@pytest.fixture(scope="module")
def found():
    return calibrate(measure_machine(noise=0.03))


def test_kernels_and_links_are_read_off(found):
    gpu, reached = found.cluster.gpu, dict(found.cluster.gpu.reached)
    assert gpu.ranks_at_once == pytest.approx(2, rel=0.05)
    assert gpu.peak_fp32_flops_per_s == pytest.approx(PEAK, rel=0.1)
    assert gpu.peak_flops_per_s == pytest.approx(PEAK / 4, rel=0.1)
    assert gpu.memory_bytes_per_s * 0.85 == pytest.approx(STREAM, rel=0.05)
    assert reached["flash2_efficiency"] * gpu.peak_fp32_flops_per_s == pytest.approx(0.3 * PEAK, rel=0.1)
    link = Link(gpu.link_bytes_per_s * 0.7, reached["collective_start_s"], reached["link_latency_s"], False)
    for n, size in product((2, 4), (2**12, 2**20, 2**22)):
        assert all_reduce_s(size, n, link) == pytest.approx(all_reduce_s(size, n, LINK), rel=0.1)


def test_steps_that_were_not_measured_are_predicted(found):
    """Another model, other layouts: errors of the measurements don't add up."""
    assert found.error < 0.05
    model = ModelShape(
        name="unseen", hidden_size=192, num_layers=6, num_heads=6, num_kv_heads=6, ffn_size=512, vocab_size=1024
    )
    batch = Batch(global_batch=8, seq_len=192)
    for layout in (
        Layout(dp_shard=4), Layout(dp_shard=4, micro_batch=2, recompute="full"), Layout(pp=4), Layout(pp=2, tp=2),
        Layout(pp=2, dp_shard=2, recompute="selective"), Layout(dp_shard=2, tp=2, recompute="full"),
    ):  # fmt: skip
        assert step_s(model, batch, layout, found.cluster) == pytest.approx(step_s(model, batch, layout), rel=0.08)


def test_the_file_gives_the_same_cluster_again(found, tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(to_toml(measure_machine(), found))
    read = load_cluster(path)
    assert read.num_gpus == 4 and read.gpus_per_node == 4
    assert dict(read.gpu.reached) == pytest.approx(dict(found.cluster.gpu.reached), rel=1e-4, abs=1e-9)
    model, batch = ModelShape(
        name="m", hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=4, ffn_size=192, vocab_size=256
    ), Batch(global_batch=8, seq_len=64)  # fmt: skip
    here, there = (step_s(model, batch, Layout(pp=2, tp=2), cluster) for cluster in (read, found.cluster))
    assert here == pytest.approx(there, rel=1e-4)
    assert find_engine_on(OWN_ENGINE, read.gpu).is_calibrated
    assert not find_engine_on("megatron", read.gpu).is_calibrated  # it has host's times of its own


def test_what_no_probe_tells_stays_general():
    alone = measure_machine()
    alone = replace(alone, probes=tuple(p for p in alone.probes if p.layout.tp == p.layout.pp == 1))
    names = set(dict(calibrate(alone).cluster.gpu.reached))
    assert "layer_host_s" in names and "layer_sync_s" in names
    assert not names & {"layer_host_tp_s", "full_host_tp_s", "selective_host_tp_s", "message_host_s"}


def test_measurements_survive_their_file(tmp_path):
    measured = measure_machine(noise=0.1)
    measured.write(tmp_path / "measured.json")
    assert Measured.read(tmp_path / "measured.json") == measured
    (tmp_path / "torn.json").write_text('{"device": "cpu"}')
    with pytest.raises(InvalidConfig, match="holds no measurements of dtlayout calibrate"):
        Measured.read(tmp_path / "torn.json")
    with pytest.raises(InvalidConfig, match="cannot be read"):
        Measured.read(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[reached.layer_hots_s]\nvalue = 1e-3\nunit = "s"\nsource = "x"', "reached.layer_hots_s is unknown"),
        (
            '[reached.matmul_efficiency]\nvalue = 2.0\nunit = "share"\nsource = "x"',
            "reached.matmul_efficiency=2.0 lies",
        ),
    ],
)
def test_a_wrong_constant_of_a_file_is_refused(tmp_path, text, problem):
    path = tmp_path / "lab.toml"
    path.write_text(f'gpu = "cpu"\ngpus = 4\n{text}\n')
    with pytest.raises(InvalidConfig, match=problem):
        find_engine_on(OWN_ENGINE, load_cluster(path).gpu)
