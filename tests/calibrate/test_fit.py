"""What is read off measurements that a known machine would give is that machine."""

import math
from dataclasses import replace
from itertools import product

import pytest
from machine import GPU_LINK, LINK, MACHINE, NETWORK, PEAK, STREAM, TP_NETWORK, measure_gpus, measure_machine, step_s

from dtlayout.base.errors import InvalidConfig
from dtlayout.calibrate.file import to_toml
from dtlayout.calibrate.fit import calibrate
from dtlayout.calibrate.measured import Measured
from dtlayout.costmodel.comm import Link, all_reduce_s
from dtlayout.costmodel.engine import OWN_ENGINE, find_engine_on
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import find_gpu, load_cluster
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape


@pytest.fixture(scope="module")
def found():
    return calibrate(measure_machine(noise=0.03))


def test_kernels_and_links_are_read_off(found):
    gpu, achieved = found.cluster.gpu, dict(found.cluster.gpu.achieved)
    assert gpu.ranks_at_once == pytest.approx(2, rel=0.05)
    assert gpu.peak_fp32_flops_per_s == pytest.approx(PEAK, rel=0.1)
    assert gpu.peak_flops_per_s == pytest.approx(PEAK / 4, rel=0.1)
    assert gpu.memory_bytes_per_s * 0.85 == pytest.approx(STREAM, rel=0.05)
    assert achieved["flash2_efficiency"] * gpu.peak_fp32_flops_per_s == pytest.approx(0.3 * PEAK, rel=0.1)
    link = Link(gpu.link_bytes_per_s * 0.7, achieved["collective_start_s"], achieved["link_latency_s"], False)
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
        Layout(dp_shard=4),
        Layout(dp_shard=4, micro_batch=2, recompute="full"),
        Layout(pp=4),
        Layout(pp=2, tp=2),
        Layout(pp=2, dp_shard=2, recompute="selective"),
        Layout(dp_shard=2, tp=2, recompute="full"),
    ):
        assert step_s(model, batch, layout, found.cluster) == pytest.approx(step_s(model, batch, layout), rel=0.08)


def test_the_file_gives_the_same_cluster_again(found, tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(to_toml(measure_machine(), found.cluster))
    read = load_cluster(path)
    assert read.num_gpus == 4 and read.gpus_per_node == 4
    assert dict(read.gpu.achieved) == pytest.approx(dict(found.cluster.gpu.achieved), rel=1e-4, abs=1e-9)
    model, batch = ModelShape(
        name="m", hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=4, ffn_size=192, vocab_size=256
    ), Batch(global_batch=8, seq_len=64)  # fmt: skip
    here, there = (step_s(model, batch, Layout(pp=2, tp=2), cluster) for cluster in (read, found.cluster))
    assert here == pytest.approx(there, rel=1e-4)
    assert find_engine_on(OWN_ENGINE, read.gpu).is_calibrated
    assert not find_engine_on("megatron", read.gpu).is_calibrated  # it has host's times of its own


def test_gpus_reach_shares_of_their_data_sheet_and_small_noise_is_no_sharing():
    found = calibrate(measure_gpus())
    gpu, sheet, achieved = found.cluster.gpu, find_gpu("h100-80g-sxm"), dict(found.cluster.gpu.achieved)
    assert (gpu.name, gpu.ranks_at_once, gpu.peak_flops_per_s) == (sheet.name, math.inf, sheet.peak_flops_per_s)
    assert achieved["matmul_efficiency"] == pytest.approx(0.7, rel=0.01)
    assert achieved["memory_efficiency"] == pytest.approx(0.9, rel=0.01)
    assert achieved["flash2_efficiency"] == pytest.approx(0.4, rel=0.01)
    assert achieved["link_efficiency"] * sheet.link_bytes_per_s == pytest.approx(GPU_LINK.bytes_per_s, rel=0.02)
    assert achieved["layer_host_s"] == pytest.approx(2e-3, rel=0.05)
    assert "message_host_s" not in achieved and "layer_host_tp_s" not in achieved
    assert found.error < 0.02


def test_a_gpu_without_bf16_reaches_a_share_of_its_peak_in_fp16():
    measured, v100 = measure_gpus(), find_gpu("v100-32g-sxm")
    slower = find_gpu(measured.gpu).peak_flops_per_s / v100.peak_fp16_flops_per_s
    matmuls = [
        replace(each, format="float16", seconds=slower * each.seconds, alone_s=slower * each.alone_s)
        for each in measured.matmuls
    ]
    attention = [replace(each, format="float16") for each in measured.attention]
    found = calibrate(replace(measured, gpu=v100.name, matmuls=tuple(matmuls), attention=tuple(attention), probes=()))
    assert dict(found.cluster.gpu.achieved)["matmul_efficiency"] == pytest.approx(0.7, rel=0.01)


def test_links_between_nodes_are_those_of_rings_of_tp_and_of_messages():
    gpu = calibrate(measure_gpus()).cluster.gpu
    achieved = dict(gpu.achieved)
    assert gpu.network_bytes_per_s * 0.7 == pytest.approx(NETWORK.bytes_per_s, rel=0.02)
    assert gpu.network_latency_s == pytest.approx(NETWORK.latency_s, rel=0.1)
    assert achieved["tp_network_efficiency"] * 4 * gpu.network_bytes_per_s == pytest.approx(60e9, rel=0.02)
    assert achieved["tp_network_latency_s"] == pytest.approx(TP_NETWORK.latency_s, rel=0.1)
    assert achieved["message_efficiency"] * gpu.network_bytes_per_s == pytest.approx(NETWORK.bytes_per_s / 2, rel=0.02)


def test_two_slow_hosts_are_told_to_keep_tp_inside():
    """As on scripts/two_hosts.sh: with the link of the network 20 times slower, tp=4 is out, and pp across is not."""
    gpu = replace(MACHINE.gpu, network_bytes_per_s=5e7 / 0.7, gpus_per_node=2, ranks_at_once=1.0)
    hosts = replace(MACHINE, gpu=gpu, gpus_per_node=2)
    model = ModelShape(
        name="m", hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=4, ffn_size=768, vocab_size=512
    )
    batch = Batch(global_batch=8, seq_len=256)
    inside, across = (step_s(model, batch, layout, hosts) for layout in (Layout(tp=2, pp=2), Layout(tp=4)))
    assert across > 1.5 * inside
    assert step_s(model, batch, Layout(pp=4), hosts) < inside


def test_what_no_probe_tells_stays_general():
    alone = measure_machine()
    alone = replace(alone, probes=tuple(p for p in alone.probes if p.layout.tp == p.layout.pp == 1))
    names = set(dict(calibrate(alone).cluster.gpu.achieved))
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
        ('[achieved.layer_hots_s]\nvalue = 1e-3\nunit = "s"\nsource = "x"', "achieved.layer_hots_s is unknown"),
        (
            '[achieved.matmul_efficiency]\nvalue = 2.0\nunit = "share"\nsource = "x"',
            "achieved.matmul_efficiency=2.0 lies",
        ),
    ],
)
def test_a_wrong_constant_of_a_file_is_refused(tmp_path, text, problem):
    path = tmp_path / "lab.toml"
    path.write_text(f'gpu = "cpu"\ngpus = 4\n{text}\n')
    with pytest.raises(InvalidConfig, match=problem):
        find_engine_on(OWN_ENGINE, load_cluster(path).gpu)
