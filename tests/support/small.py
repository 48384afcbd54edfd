"""A scenario of round numbers, whose every estimate can be computed by hand."""

from dtlayout.costmodel.engine import Engine
from dtlayout.costmodel.engine_constants import Constants
from dtlayout.costmodel.engine_features import Features
from dtlayout.costmodel.scenario import Scenario
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, Gpu
from dtlayout.spec.model_shape import ModelShape

US = 1e-6
GPU = Gpu(
    name="round",
    device_names=(),
    peak_flops_per_s=100e12,
    memory_bytes=80_000_000_000,
    memory_bytes_per_s=1e12,
    link_bytes_per_s=100e9,
    link_latency_s=3e-6,
    network_bytes_per_s=10e9,
    network_latency_s=10e-6,
    gpus_per_node=8,
)
ROUND = Constants(
    matmul_efficiency=0.5,
    matmul_fill=0.0,
    flash2_efficiency=0.5,
    flash1_efficiency=0.2,
    flash3_efficiency=0.8,
    efficient_efficiency=0.25,
    memory_efficiency=1.0,
    softmax_traffic_bytes=20.0,
    fused_softmax_traffic_bytes=2.0,
    width_traffic_bytes=60.0,
    norm_traffic_bytes=100.0,
    norm_launch_s=50e-6,
    logit_traffic_bytes=50.0,
    link_efficiency=0.5,
    collective_start_s=10e-6,
    link_latency_s=5e-6,
    tp_exposed=1.0,
    network_efficiency=0.5,
    network_sharing=0.5,
    network_congestion=0.1,
    tp_network_efficiency=0.5,
    tp_network_latency_s=20e-6,
    message_efficiency=0.5,
    overlap_slowdown=0.0,
    experts_efficiency=1.0,
    routing_wait_s=0.0,
    expert_wait_s=0.0,
    expert_bias_traffic_bytes=100.0,
    exchange_efficiency=0.5,
)
MODEL = ModelShape(
    name="round", hidden_size=1000, num_layers=4, num_heads=10, num_kv_heads=5, ffn_size=2000, vocab_size=10_000
)


def scenario(*, num_gpus: int = 8, features: Features | None = None, **constants: float) -> Scenario:
    """8 GPUs a node, sequences of 1000 tokens."""
    engine = Engine(
        name="round",
        gpu="round",
        features=features or Features(),
        constants=ROUND,
        fitted=(),
        source="round numbers",
    )
    return Scenario(
        model=MODEL,
        batch=Batch(global_batch=64, seq_len=1000),
        cluster=Cluster(gpu=GPU, num_gpus=num_gpus, gpus_per_node=8),
        engine=engine.with_constants(**constants),
    )
