"""What arXiv:2311.05610 found over its sweeps comes out of the model: each finding on the study's own settings.

The allowed ranges are those of the study's runs, widened by the noise that repeats of it have.
"""

from dataclasses import replace
from functools import cache
from statistics import mean, median

import pytest

from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.estimate import Estimate, Estimator
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.presets import find_preset
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

BEST = Kernels(attention="sdpa-flash", norm="fused")
EAGER_NORM = Kernels(attention="sdpa-flash", norm="eager")
SWEEPS = [  # model, GPUs, sequence, batch, tp and pp that were tried
    ("llama-13b", 64, 2048, 2048, (1, 2), (1, 2)),
    ("llama-13b", 128, 8192, 512, (1, 2, 4), (1, 2, 4)),
    ("llama-30b", 256, 2048, 2048, (1, 2, 4), (1, 2, 4)),
    ("llama-30b", 128, 8192, 512, (2, 4), (2, 4, 8, 16)),
    ("llama-65b", 128, 2048, 2048, (2, 4, 8), (2, 4, 8)),
]


@cache
def estimator(model: str, gpus: int, seq_len: int, global_batch: int) -> Estimator:
    shape = replace(find_preset(model), vocab_size=128_000)
    cluster = Cluster(gpu=find_gpu("a100-80g-sxm"), num_gpus=gpus, gpus_per_node=8)
    engine = find_engine("aa-scaling", "a100-80g-sxm")
    batch = Batch(global_batch=global_batch, seq_len=seq_len)
    return Estimator(Scenario(model=shape, batch=batch, cluster=cluster, engine=engine))


def predict(sweep, tp, pp, micro_batch=1, kernels=BEST, **layout) -> Estimate:
    model, gpus, seq_len, global_batch, _, _ = sweep
    values = {"sequence_parallel": False, **layout}
    layout = Layout(tp=tp, pp=pp, dp_shard=gpus // (tp * pp), micro_batch=micro_batch, **values)
    return estimator(model, gpus, seq_len, global_batch).estimate(layout, kernels)


def grid(sweep) -> list[tuple[int, int]]:
    return [(tp, pp) for tp in sweep[4] for pp in sweep[5]]


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda s: f"{s[0]}-{s[2]}")
def test_micro_batch_1_is_best(sweep):
    found = [
        predict(sweep, tp, pp, b, recompute=recompute)
        for tp, pp in grid(sweep)
        for b in (1, 2, 4)
        for recompute in ("none", "full")
    ]
    fitting = [f for f in found if f.fits]
    best = max(f.mfu for f in fitting)
    tied = [f for f in fitting if f.mfu > 0.995 * best]  # what a search takes for equal, and then prefers free memory
    assert min(tied, key=lambda f: f.peak_bytes).layout.micro_batch == 1


def test_doubling_the_micro_batch_changes_little_at_a_fixed_layout():
    gains = [predict(s, tp, pp, 2).mfu / predict(s, tp, pp, 1).mfu - 1 for s in SWEEPS for tp, pp in grid(s)]
    assert abs(median(gains)) < 0.03


def test_full_recompute_costs_a_quarter():
    ratios = [predict(s, tp, pp, recompute="full").mfu / predict(s, tp, pp).mfu for s in SWEEPS for tp, pp in grid(s)]
    assert 0.72 < mean(ratios) < 0.80  # the study: 0.76


def test_the_fused_norm_gains_speed_and_memory():
    """6.5 points of MFU at a fixed layout, and more layouts that fit."""
    pairs = [(predict(s, *degrees), predict(s, *degrees, kernels=EAGER_NORM)) for s in SWEEPS for degrees in grid(s)]
    assert 0.05 < mean(fused.mfu - eager.mfu for fused, eager in pairs) < 0.08
    assert sum(fused.fits for fused, _ in pairs) > sum(eager.fits for _, eager in pairs)


def test_pipeline_before_tensor_parallelism():
    """At a fixed product the lower tp wins in 92 % of pairs, by 5.5 points."""
    gains = [
        low.mfu - high.mfu
        for s in SWEEPS
        for tp, pp in grid(s)
        if (2 * tp, pp // 2) in grid(s)
        for low, high in [(predict(s, tp, pp), predict(s, 2 * tp, pp // 2))]
    ]
    assert mean(gain > 0 for gain in gains) > 0.85
    assert 0.02 < mean(gains) < 0.08


@pytest.mark.parametrize(("tp", "ratio"), [(1, 0.93), (2, 0.85), (4, 0.72)])
def test_doubling_tp_costs_more_each_time(tp, ratio):
    ratios = [
        predict(s, 2 * tp, pp).mfu / predict(s, tp, pp).mfu for s in SWEEPS for pp in s[5] if {tp, 2 * tp} <= set(s[4])
    ]
    assert mean(ratios) == pytest.approx(ratio, abs=0.08)


@pytest.mark.parametrize(("pp", "ratio"), [(1, 1.00), (2, 1.01), (4, 0.94), (8, 0.94)])
def test_doubling_pp_costs_little(pp, ratio):
    ratios = [
        predict(s, tp, 2 * pp).mfu / predict(s, tp, pp).mfu
        for s in SWEEPS
        for tp in s[4]
        if {pp, 2 * pp} <= set(s[5]) and predict(s, tp, pp).fits
    ]
    assert mean(ratios) == pytest.approx(ratio, abs=0.08)


def test_sequence_parallelism_gains_with_tp():
    """Nothing at tp 1, 0.3 to 1.9 points at tp 2, 3 to 6 at tp 4."""

    def gains(tp: int) -> list[float]:
        found = [s for s in SWEEPS if tp in s[4]]
        on, off = ([predict(s, tp, 4, sequence_parallel=sp).mfu for s in found if 4 in s[5]] for sp in (True, False))
        return [a - b for a, b in zip(on, off, strict=True)]

    assert gains(1) == [0.0] * len(gains(1))
    assert 0.003 < mean(gains(2)) < 0.025
    assert 0.02 < mean(gains(4)) < 0.06
    assert mean(gains(4)) > mean(gains(2))


def test_more_gpus_at_a_fixed_batch_lose_more_than_the_bubble_explains():
    def at(gpus: int) -> Estimate:
        return predict(("llama-13b", gpus, 2048, 2048, None, None), 2, 2)

    few, many = at(32), at(256)
    working = [m / (m + 1) for m in (256, 32)]  # 1 - bubble fraction of two stages, arXiv:2104.04473, sec. 2.2
    assert many.mfu / few.mfu < working[1] / working[0] < 1


def test_the_best_run_of_the_study_fits_and_what_it_has_less_than_predicted_is_within_its_reduction():
    """26.54 s were measured. Without gradients to reduce it would take less, and no network of eight cards is needed
    that is faster than their data sheet; with an eager norm or twice the micro-batch it was out of memory."""
    sweep = SWEEPS[0]
    best = predict(sweep, tp=1, pp=1)
    assert best.fits
    assert not predict(sweep, tp=1, pp=1, kernels=EAGER_NORM).fits
    assert not predict(sweep, tp=1, pp=1, micro_batch=2).fits
    rest_s = best.step_time_s - best.time.dp
    assert rest_s < 26.54 < best.step_time_s < 1.16 * 26.54
    sent_bytes = (2 * 4 + 2) * best.memory[0].parameters / 2  # fp32 all-reduced, bf16 gathered
    assert sent_bytes / (26.54 - rest_s) < 8 * find_gpu("a100-80g-sxm").network_bytes_per_s
