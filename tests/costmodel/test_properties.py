"""What physics demands of any estimate, whatever the engine, the GPU and the layout."""

from dataclasses import astuple, replace
from itertools import pairwise, product
from math import inf, isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtlayout.costmodel.engine import find_engine, known_engines
from dtlayout.costmodel.estimate import Estimate, Estimator, estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.costmodel.stage_work import wait_for_host
from dtlayout.models.presets import PRESETS
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu, known_gpus
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape

ENGINES, GPUS = known_engines(), [*known_gpus(), "cpu"]
MEGATRON_STATE = [name for name in ENGINES if find_engine(name, "cpu").features.sharding == "distributed-optimizer"]
"""Engines whose components are sums of their own; under FSDP2 each is what it is at the fullest moment of all."""
FSDP2 = [name for name in ENGINES if name not in MEGATRON_STATE]
SPEEDS = ("peak_flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "network_bytes_per_s")
DELAYS = ("link_latency_s", "network_latency_s")
CALIBRATED = [(name, gpu) for name in ENGINES for gpu in GPUS if find_engine(name, gpu).is_calibrated]

Case = tuple[Scenario, Layout, Kernels]
powers = st.integers(0, 3).map(lambda n: 2**n)
kernels = st.builds(
    Kernels,
    attention=st.sampled_from(["sdpa-flash", "sdpa-math", "flash1", "megatron-softmax", "torch"]),
    norm=st.sampled_from(["eager", "fused"]),
)


@st.composite
def models(draw) -> ModelShape:
    heads = draw(st.sampled_from([6, 8, 32]))
    return ModelShape(
        name="some",
        hidden_size=heads * draw(st.sampled_from([64, 128])),
        num_layers=draw(st.integers(1, 24)),
        num_heads=heads,
        num_kv_heads=heads // draw(st.sampled_from([1, 2])),
        ffn_size=draw(st.sampled_from([688, 2048, 11_008])),
        vocab_size=draw(st.sampled_from([1000, 32_000, 128_256])),
        gated_ffn=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
    )


@st.composite
def cases(draw, engines=ENGINES) -> Case:
    """A layout that fills a cluster; our trainer need not take it."""
    model, engine = draw(models()), draw(st.sampled_from(engines))
    gpu = draw(st.sampled_from(GPUS))
    found = find_engine(engine, gpu)
    most_stages = model.num_layers if found.features.stage_split == "cost" else 12
    pp = draw(st.integers(1, min(8, most_stages)))
    v = draw(st.integers(2, 3)) if 1 < pp <= most_stages // 3 and draw(st.booleans()) else 1
    layout = Layout(
        pp=pp,
        dp_replicate=draw(st.integers(1, 3)),
        dp_shard=draw(powers),
        cp=draw(st.sampled_from([1, 1, 2])),
        tp=draw(st.sampled_from([1, 2, 3, 4, 8, 16])),
        sequence_parallel=draw(st.booleans()),
        micro_batch=draw(powers),
        schedule="interleaved-1f1b" if v > 1 else draw(st.sampled_from(["1f1b", "1f1b", "gpipe"])),
        virtual_stages=v,
        zero=draw(st.sampled_from([1, 2, 3])),
        recompute=draw(
            st.sampled_from(["none", "full", "selective", "keep-attention", "keep-matmuls", "every-2", "3-of-4"])
        ),
    )
    m = draw(st.integers(1, 20)) * (pp if v > 1 else 1)
    batch = Batch(
        global_batch=m * layout.dp * layout.micro_batch, seq_len=draw(st.sampled_from([128, 1000, 2048, 8192]))
    )
    per_node = draw(st.sampled_from([1, 4, 8]))
    cluster = Cluster(gpu=find_gpu(gpu), num_gpus=layout.world_size, gpus_per_node=per_node)
    scenario = Scenario(model=model, batch=batch, cluster=cluster, engine=found)
    return scenario, layout, draw(kernels)


def state_bytes(rank) -> float:
    return rank.parameters + rank.gradients + rank.optimizer


def never_more(case: Case, part, **changes) -> None:
    """Changing the layout leaves no rank with more of `part`."""
    scenario, layout, kernels = case
    before, after = (
        [part(rank) for rank in Estimator(scenario).memory(each, kernels)]
        for each in (layout, replace(layout, **changes))
    )
    assert all(a <= b * (1 + 1e-9) for a, b in zip(after, before, strict=True)), (before, after)


def slower(scenario: Scenario, **gpu) -> Scenario:
    return replace(scenario, cluster=replace(scenario.cluster, gpu=replace(scenario.cluster.gpu, **gpu)))


def busy_s(found: Estimate) -> float:
    """The pipeline's part of a step."""
    return found.time.total - found.time.dp - found.time.optimizer


@settings(max_examples=80, deadline=None)
@given(cases())
def test_every_layout_has_a_finite_estimate_whether_our_trainer_takes_it_or_not(case):
    found = estimate(*case)
    numbers = [*astuple(found.time), *(size for rank in found.memory for size in astuple(rank))]
    assert all(isfinite(number) and number >= 0 for number in numbers)
    assert found.time.total > 0 and found.mfu > 0 and found.capacity_bytes > 0
    assert len(found.memory) == case[1].pp and len(found.stage_layers) == case[1].num_stages


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=4, dp_shard=2, zero=3),
        Layout(pp=8, micro_batch=4),  # fewer microbatches than ranks
        Layout(tp=3, dp_shard=2),
        Layout(cp=2, tp=2),
        Layout(pp=2, tp=2, dp_replicate=2, dp_shard=2, zero=2, virtual_stages=2, schedule="interleaved-1f1b"),
    ],
    ids=str,
)
def test_every_engine_predicts_every_gpu_type(layout):
    for engine, gpu in product(ENGINES, GPUS):
        scenario = Scenario(
            model=PRESETS["llama3.2-1b"],
            batch=Batch(global_batch=16, seq_len=1024),
            cluster=Cluster(gpu=find_gpu(gpu), num_gpus=layout.world_size, gpus_per_node=8),
            engine=find_engine(engine, gpu),
        )
        found = estimate(scenario, layout, Kernels())
        assert 0 < found.step_time_s < inf and 0 < found.peak_bytes < inf, (engine, gpu)


def test_a_model_may_have_stages_without_blocks():
    """Head and embedding weigh as much as four blocks each, so an end may have a stage to itself."""
    model = replace(PRESETS["llama3.2-1b"], num_layers=12, tied_embeddings=False)
    for engine in ("aa-scaling", "nanotron"):
        scenario = Scenario(
            model=model,
            batch=Batch(global_batch=16, seq_len=1024),
            cluster=Cluster(gpu=find_gpu("a100-80g-sxm"), num_gpus=5, gpus_per_node=8),
            engine=find_engine(engine, "a100-80g-sxm"),
        )
        found = estimate(scenario, Layout(pp=5), Kernels())
        assert min(found.stage_layers) == 0 and sum(found.stage_layers) == 12
        assert 0 < found.step_time_s < inf and 0 < found.peak_bytes < inf


@settings(max_examples=40, deadline=None)
@given(cases())
def test_components_add_up(case):
    scenario, layout, kernels = case
    estimator = Estimator(scenario)
    found = estimator.estimate(layout, kernels)
    for rank in found.memory:
        assert rank.total == pytest.approx(sum(rank.as_dict().values()))
        assert rank.needed == pytest.approx(rank.total - rank.run_ahead - rank.fragments)
    assert found.peak_bytes == max(rank.total for rank in found.memory)
    m = max(1, layout.num_microbatches(scenario.batch))
    work = estimator.work(layout, kernels)
    for w in work:
        parts = w.compute_s + w.recompute_s + w.tp_s + w.pp_s + w.host_s
        assert w.forward_s + w.backward_s == pytest.approx(parts)
    ends = estimator.play(layout, m, work, estimator.delay_s(layout)).finished_s
    fixed_s = estimator.fixed_s(m, found.peak_bytes)
    steps = [end + sum(estimator.update_s(rank, layout, m, work)) + fixed_s for rank, end in enumerate(ends)]
    assert found.time.total == pytest.approx(sum(found.time.as_dict().values()))
    assert found.time.total == pytest.approx(max(steps))
    assert found.time.total >= (1 - 1e-12) * estimator.lower_bound_s(layout, kernels)  # without a pipeline it is equal


@settings(max_examples=40, deadline=None)
@given(cases(MEGATRON_STATE))
def test_more_tp_needs_no_more_parameter_bytes(case):
    never_more(case, lambda rank: rank.parameters, tp=2 * case[1].tp)


@settings(max_examples=40, deadline=None)
@given(cases(MEGATRON_STATE), st.sampled_from(["full", "selective", "keep-attention", "keep-matmuls"]))
def test_recomputation_needs_no_more_activation_bytes(case, recompute):
    scenario, layout, kernels = case
    never_more((scenario, replace(layout, recompute="none"), kernels), lambda r: r.activations, recompute=recompute)


@settings(max_examples=40, deadline=None)
@given(cases(MEGATRON_STATE))
def test_sequence_parallelism_needs_no_more_activation_bytes(case):
    scenario, layout, kernels = case
    before = scenario, replace(layout, sequence_parallel=False), kernels
    never_more(before, lambda rank: rank.activations, sequence_parallel=True)


@settings(max_examples=40, deadline=None)
@given(cases(MEGATRON_STATE), st.sampled_from([2, 3]))
def test_a_higher_zero_stage_needs_no_more_state_bytes(case, zero):
    scenario, layout, kernels = case
    never_more((scenario, replace(layout, zero=zero - 1), kernels), state_bytes, zero=zero)


@settings(max_examples=40, deadline=None)
@given(cases(FSDP2), st.sampled_from([{"zero": 3}, {"recompute": "full"}]))
def test_under_fsdp2_what_saves_memory_needs_no_more_of_it_on_many_shards_of_deep_stages(case, saves):
    scenario, layout, kernels = case
    # Deep, and with ends that are small beside the blocks: one unit must not be most of a stage.
    deep = replace(scenario, model=replace(scenario.model, num_layers=8 * layout.num_stages, vocab_size=512))
    plain = replace(layout, dp_replicate=1, dp_shard=8 * layout.dp_shard, zero=1, recompute="none")
    never_more((deep, plain, kernels), lambda rank: rank.total, **saves)


@settings(max_examples=40, deadline=None)
@given(cases(MEGATRON_STATE))
def test_a_larger_micro_batch_needs_no_fewer_activation_bytes(case):
    scenario, layout, kernels = case
    twice = replace(scenario, batch=replace(scenario.batch, global_batch=2 * scenario.batch.global_batch))
    never_more(
        (twice, replace(layout, micro_batch=2 * layout.micro_batch), kernels),
        lambda r: r.activations,
        micro_batch=layout.micro_batch,
    )


@settings(max_examples=50, deadline=None)
@given(cases())
def test_as_many_larger_micro_batches_need_no_less_memory(case):
    """Fragments are those of the fullest moment, which may become one in which less comes and goes."""
    scenario, layout, kernels = case
    twice = replace(scenario, batch=replace(scenario.batch, global_batch=2 * scenario.batch.global_batch))
    larger = Estimator(twice).memory(replace(layout, micro_batch=2 * layout.micro_batch), kernels)
    for rank, before in zip(larger, Estimator(scenario).memory(layout, kernels), strict=True):
        assert rank.total - rank.fragments >= before.total - before.fragments


@settings(max_examples=80, deadline=None)
@given(cases(), st.sampled_from([*SPEEDS, *DELAYS]), st.floats(1.01, 20), st.booleans())
def test_slower_hardware_never_helps(case, number, factor, splits_backward):
    scenario, layout, kernels = case
    if splits_backward and layout.virtual_stages == 1:
        layout = replace(layout, schedule="zb-h1")
    value = getattr(scenario.cluster.gpu, number)
    worse = slower(scenario, **{number: value * factor if number in DELAYS else value / factor})
    assert estimate(worse, layout, kernels).step_time_s >= estimate(scenario, layout, kernels).step_time_s * (1 - 1e-9)


def test_a_slower_gpu_does_not_help_by_hiding_two_things_behind_one_backward():
    """ZeRO-3 reduces gradients and gathers parameters again in backward: that hides their sum once."""
    layout = Layout(dp_shard=32, zero=3)
    scenario = Scenario(
        model=PRESETS["llama3.1-8b"],
        batch=Batch(global_batch=128, seq_len=4096),
        cluster=Cluster(gpu=find_gpu("a100-80g-sxm"), num_gpus=32, gpus_per_node=8),
        engine=find_engine("dtlayout", "a100-80g-sxm"),
    )
    scenario = slower(scenario, network_bytes_per_s=5e9)
    steps = [
        estimate(slower(scenario, peak_flops_per_s=312e12 / factor), layout, Kernels()).step_time_s
        for factor in (1, 2, 3, 4, 8)
    ]
    assert steps == sorted(steps)


seconds = st.tuples(st.floats(0, 4), st.floats(0, 4))


@settings(max_examples=200, deadline=None)
@given(seconds, seconds, seconds)
def test_a_slower_gpu_shortens_neither_direction_though_the_host_sets_the_pace(gpu_s, more_s, host_s):
    slower_s = gpu_s[0] + more_s[0], gpu_s[1] + more_s[1]
    fast, slow = (
        [on_gpu + wait for on_gpu, wait in zip(each, wait_for_host(each, host_s), strict=True)]
        for each in (gpu_s, slower_s)
    )
    assert sum(fast) == pytest.approx(max(sum(gpu_s), sum(host_s)), abs=1e-12)
    assert all(before <= after + 1e-12 for before, after in zip(fast, slow, strict=True)), (fast, slow)


@pytest.mark.parametrize("engine", ["accelerate", "dtlayout", "torchtitan"])
def test_a_slower_gpu_does_not_help_by_hiding_more_behind_a_longer_backward(engine):
    """The host sets the pace of small blocks that are computed again, and dp's reduction is longer than a backward."""
    model = ModelShape(
        name="small", hidden_size=1024, num_layers=2, num_heads=8, num_kv_heads=8, ffn_size=688, vocab_size=1000
    )
    scenario = Scenario(
        model=model,
        batch=Batch(global_batch=2, seq_len=2048),
        cluster=Cluster(gpu=find_gpu("h100-80g-sxm"), num_gpus=2, gpus_per_node=1),
        engine=find_engine(engine, "h100-80g-sxm"),
    )
    peak, layout = scenario.cluster.gpu.peak_flops_per_s, Layout(dp_replicate=2, recompute="full")
    scenarios = [slower(scenario, peak_flops_per_s=peak / factor) for factor in (1, 1.5, 2, 3, 8)]
    steps = [estimate(each, layout, Kernels()).step_time_s for each in scenarios]
    assert all(before <= after * (1 + 1e-12) for before, after in pairwise(steps)), steps


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(ENGINES), st.sampled_from([2, 4, 8]), st.integers(1, 4), powers)
def test_fewer_microbatches_of_the_same_batch_make_more_bubble(engine, pp, rounds, micro_batch):
    model = ModelShape(
        name="even", hidden_size=2048, num_layers=16, num_heads=16, num_kv_heads=16, ffn_size=5632, vocab_size=64
    )
    layout = Layout(pp=pp, micro_batch=micro_batch)
    scenario = Scenario(
        model=model,
        batch=Batch(global_batch=4 * rounds * pp * micro_batch, seq_len=1024),
        cluster=Cluster(gpu=find_gpu("h100-80g-sxm"), num_gpus=pp, gpus_per_node=8),
        engine=find_engine(engine, "h100-80g-sxm"),
    )
    found = [estimate(scenario, replace(layout, micro_batch=micro_batch * n), Kernels()) for n in (1, 2, 4)]
    shares = [each.time.bubble / busy_s(each) for each in found]
    assert shares[0] < shares[1] < shares[2]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(CALIBRATED), st.sampled_from(sorted(PRESETS)), st.sampled_from([2048, 4096, 8192]), st.data())
def test_no_calibrated_engine_is_faster_than_the_peak(engine, name, seq_len, data):
    """Of published models at their sequences: a causal kernel computes half the attention that MFU credits."""
    model, gpu = PRESETS[name], find_gpu(engine[1])
    pp = data.draw(powers.filter(lambda pp: pp <= model.num_layers))
    layout = Layout(pp=pp, tp=data.draw(powers), dp_shard=data.draw(powers), micro_batch=data.draw(powers))
    scenario = Scenario(
        model=model,
        batch=Batch(global_batch=layout.dp * layout.micro_batch * data.draw(st.integers(1, 64)), seq_len=seq_len),
        cluster=Cluster(gpu=gpu, num_gpus=layout.world_size, gpus_per_node=8),
        engine=find_engine(*engine),
    )
    assert 0 < estimate(scenario, layout, Kernels()).mfu < 1
