"""Numbers that others published, out of the cost model: none of these runs was used to fit a constant."""

from dataclasses import replace

import pytest

from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.estimate import Estimate, estimate
from dtlayout.costmodel.memory import block_bytes_per_token, count_stage_parameters, state_bytes
from dtlayout.costmodel.scenario import Scenario, cut
from dtlayout.models.counting import count_parameters
from dtlayout.models.presets import find_preset
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape


def gpt(name: str, hidden: int, layers: int, heads: int, *, vocab: int = 51_200, **sizes) -> ModelShape:
    """An ungated transformer whose FFN is four times as wide as the rest."""
    return ModelShape(
        name=name, hidden_size=hidden, num_layers=layers, num_heads=heads, ffn_size=4 * hidden, vocab_size=vocab,
        gated_ffn=False, **{"num_kv_heads": heads, "tied_embeddings": True, **sizes},
    )  # fmt: skip


GPT_162B = gpt("gpt-162b", 20_480, 32, 128)
GPT_175B = gpt("gpt-175b", 12_288, 96, 96)
NEMOTRON_340B = gpt("nemotron-4-340b", 18_432, 96, 96, vocab=256_000, num_kv_heads=8, tied_embeddings=False)
OLD_KERNELS = Kernels(attention="megatron-softmax")
"""What Megatron-LM ran in 2021."""


def scenario(model: ModelShape, gpu: str, gpus: int, global_batch: int, seq_len: int, engine: str = "megatron"):
    return Scenario(
        model=model,
        batch=Batch(global_batch=global_batch, seq_len=seq_len),
        cluster=Cluster(gpu=find_gpu(gpu), num_gpus=gpus, gpus_per_node=8),
        engine=find_engine(engine, gpu),
    )


def tflops_per_gpu(found: Estimate, setting: Scenario) -> float:
    """Model TFLOP/s by the study's convention."""
    return found.mfu * setting.cluster.gpu.peak_flops_per_s / 1e12


def test_mixed_precision_training_keeps_18_bytes_a_parameter():
    """arXiv:2406.11704 (Nemotron-4) gives 6,120 GB for 340B: 2 + 4 + 12 bytes, nothing sharded, gradients in fp32."""
    setting = scenario(NEMOTRON_340B, "h100-80g-sxm", 1, 1, 4096)
    features = replace(setting.engine.features, gradient_bytes=4)
    setting, layout = replace(setting, engine=replace(setting.engine, features=features)), Layout()
    n = sum(count_stage_parameters(NEMOTRON_340B, stage, 1) for stage in cut(setting, layout))
    state = sum(state_bytes(setting, layout, n, unit=0).values())
    assert n == count_parameters(NEMOTRON_340B)
    assert state / n == 18
    assert 340e9 * state / n == pytest.approx(6120e9)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_sequence_parallelism_divides_what_tensor_parallelism_leaves_whole(tp):
    """arXiv:2205.05198, eq. 2 and 4: a block keeps bsh(10 + 24/t) without and bsh(10 + 24)/t with it.

    That block has dropout masks and GELU, a gated one has none: what counts is which part is divided. Ours keeps
    4 · 2h beside the norms, whole or divided, and the rest over t.
    """
    setting = scenario(find_preset("llama2-7b"), "a100-80g-sxm", 8, 8, 2048)
    h = setting.model.hidden_size
    whole = {t: block_bytes_per_token(setting, Layout(tp=t, sequence_parallel=False), Kernels()).whole for t in (1, tp)}
    sharded = block_bytes_per_token(setting, Layout(tp=tp, sequence_parallel=True), Kernels()).whole
    assert whole[tp] == pytest.approx(8 * h + (whole[1] - 8 * h) / tp)
    assert sharded == pytest.approx(whole[1] / tp)


@pytest.mark.parametrize("global_batch", [32, 128])
def test_tensor_parallelism_is_best_inside_the_server_and_worse_across(global_batch):
    """arXiv:2104.04473, fig. 13: 162B on 64 A100s, tp·pp = 64, is fastest at tp 8 and pp 8, or close to it at tp 4."""
    setting = scenario(GPT_162B, "a100-80g-sxm", 64, global_batch, 2048)
    speed = {
        tp: estimate(setting, Layout(tp=tp, pp=64 // tp, sequence_parallel=False, recompute="full"), OLD_KERNELS).mfu
        for tp in (2, 4, 8, 16, 32)
    }
    assert max(speed, key=speed.__getitem__) == 8
    assert speed[2] < speed[4] < speed[8] > 1.3 * speed[16] > 1.3 * speed[32]


def test_interleaving_helps_small_batches_most():
    """arXiv:2104.04473, fig. 12: 175B on 96 A100s; the interleaved schedule gains most at 12, some 10 % at 60."""
    gains = []
    for global_batch in (12, 24, 36, 48, 60):
        setting = scenario(GPT_175B, "a100-80g-sxm", 96, global_batch, 2048)
        plain = Layout(tp=8, pp=12, sequence_parallel=False, recompute="full")
        interleaved = Layout(
            tp=8, pp=12, sequence_parallel=False, recompute="full", schedule="interleaved-1f1b", virtual_stages=2
        )
        gains.append(estimate(setting, interleaved, OLD_KERNELS).mfu / estimate(setting, plain, OLD_KERNELS).mfu - 1)
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 0.2 and 0.05 < gains[-1] < 0.15


@pytest.mark.parametrize(
    ("model", "gpus", "global_batch", "seq_len", "layout", "published"),
    [
        # arXiv:2407.21783, table 4; 126 layers on 16 ranks, interleaved one layer at a time as its sec. 3.3.2 does
        (find_preset("llama3.1-405b"), 16_384, 2048, 8192,
         Layout(tp=8, pp=16, dp_shard=128, schedule="interleaved-1f1b", virtual_stages=7), 400),
        (find_preset("llama3.1-405b"), 8192, 2048, 8192,
         Layout(tp=8, pp=16, dp_shard=64, schedule="interleaved-1f1b", virtual_stages=7), 430),
        # arXiv:2406.11704, table 2: 8.0 s a step at 41 % MFU
        (NEMOTRON_340B, 6144, 2304, 4096,
         Layout(tp=8, pp=12, dp_shard=64, schedule="interleaved-1f1b", virtual_stages=8), 405),
    ],
    ids=["405b-dp128", "405b-dp64", "340b"],
)  # fmt: skip
def test_published_speeds_of_the_largest_runs_within_ten_percent(model, gpus, global_batch, seq_len, layout, published):
    """By programs that did not hide tp's messages behind matmuls, as Megatron's users do since."""
    setting = scenario(model, "h100-80g-sxm", gpus, global_batch, seq_len)
    setting = replace(setting, engine=setting.engine.with_constants(tp_exposed=1.0))
    assert layout.world_size == gpus
    found = estimate(setting, layout, Kernels(attention="sdpa-cudnn"))
    assert tflops_per_gpu(found, setting) == pytest.approx(published, rel=0.10)
