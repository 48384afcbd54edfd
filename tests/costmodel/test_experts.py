"""Experts: what they compute, send and hold, against dense blocks and numbers by hand on round hardware."""

from dataclasses import replace

import pytest
from small import MODEL, US
from small import scenario as dense_scenario

from dtlayout.costmodel.cache_keys import StageClass
from dtlayout.costmodel.comm import exchange_s
from dtlayout.costmodel.compute import block_ep_s, block_time, host_s
from dtlayout.costmodel.engine_features import Features
from dtlayout.costmodel.estimate import Estimator, estimate
from dtlayout.costmodel.fsdp2.blocks import Recomputed, WeightGradients, block_backward, block_forward
from dtlayout.costmodel.fsdp2.phase import sequence
from dtlayout.costmodel.fsdp2.sizes import Sizes
from dtlayout.costmodel.fsdp2.units import UnitBytes, block_unit
from dtlayout.costmodel.memory import block_bytes_per_token, count_stage_experts, count_stage_parameters
from dtlayout.costmodel.recomputation import recompute_time
from dtlayout.costmodel.scenario import Scenario, count_expert_shards, cut
from dtlayout.costmodel.update import find_update, update_times
from dtlayout.models.counting import count_block_parameters, count_parameters
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts, LatentAttention
from dtlayout.spec.precision import Precision
from dtlayout.spec.recompute import Recompute

ONE = Experts(number=1, per_token=1, ffn_size=MODEL.ffn_size)
"""An expert as wide as the dense feed-forward, for all tokens."""
EIGHT = Experts(number=8, per_token=2, ffn_size=500)
SHARED = replace(EIGHT, shared_ffn_size=1000)
LATENT = {
    "num_kv_heads": 10, "head_dim": 96,
    "latent_attention": LatentAttention(query_rank=300, kv_rank=100, rope_width=32, value_width=64),
}  # fmt: skip
FSDP2 = Features(sharding="fsdp2", checkpointing="torch")


def scenario(experts: Experts | None, **settings) -> Scenario:
    found = dense_scenario(**settings)
    return replace(found, model=replace(found.model, experts=experts))


def forward_us(experts: Experts | None, layout: Layout, **constants: float) -> float:
    return block_time(scenario(experts, **constants), layout, Kernels()).forward_s / US


def test_one_expert_computes_what_a_dense_feed_forward_does():
    """Beside it a router, 1000·1000·1 bound by memory, and a copy of each token on its way there and back, 4·T·h·e."""
    router_us, permuting_us = 2 * (1000 * 1000 + 1000 + 1000) / 1e12 / US, 4 * 1000 * 1000 * 2 / 1e12 / US
    assert forward_us(ONE, Layout()) == pytest.approx(forward_us(None, Layout()) + router_us + permuting_us)
    one, dense = (block_time(scenario(each), Layout(), Kernels()) for each in (ONE, None))
    assert (one.backward_s - dense.backward_s) / US == pytest.approx(2 * router_us + permuting_us)


def test_experts_multiply_the_rows_that_they_are_sent():
    """k·f = 1000: half of the dense FLOPs, 120 us; a shared expert of 1000 is the other half.

    Elementwise are 12·(2000 - 1000) bytes a token less, a third of it in forward.
    """
    router_us, permuting_us = 2 * (8 * 1000 + 1000 * 1000 + 8 * 1000) / 1e12 / US, 2 * 3 * 2.0
    beside_us = router_us + permuting_us
    dense_us = forward_us(None, Layout())
    assert forward_us(EIGHT, Layout()) == pytest.approx(dense_us - 120 - 4 + beside_us)
    assert forward_us(SHARED, Layout()) == pytest.approx(dense_us + beside_us)


def in_fp8(experts: Experts, name: str) -> Scenario:
    """Our trainer on a GPU that multiplies twice as fast in fp8, of a model with sizes that 16 divides."""
    found = scenario(experts, fp8_efficiency=0.5, features=Features(casts_itself=True))
    cluster = replace(found.cluster, gpu=replace(found.cluster.gpu, peak_fp8_flops_per_s=200e12))
    model = replace(found.model, hidden_size=1600, ffn_size=3200)
    return replace(found, model=model, cluster=cluster, precision=Precision(matmuls=name))


@pytest.mark.parametrize(("name", "cast_bytes"), [("fp8-tensorwise", 6), ("fp8-rowwise", 10)])
@pytest.mark.parametrize("ep", [1, 8])
def test_a_loop_over_experts_multiplies_in_fp8_and_casts_for_each(name, cast_bytes, ep):
    """Of 1000 tokens 2 copies: three matmuls at 100 instead of 50 TFLOP/s; read by gate, up and down, and gradients of
    what they give; three matrices of each of the rank's experts, every time."""
    layout, wide = Layout(dp_shard=8, ep=ep), replace(EIGHT, ffn_size=480)
    setting = in_fp8(wide, name)
    loop, grouped = (block_time(setting, layout, Kernels(experts=each)) for each in ("loop", "grouped"))
    spared_s = 3 * 2 * 2000 * 1600 * 480 * (1 / 50e12 - 1 / 100e12)
    rows_s = cast_bytes * 2000 * (2 * 1600 + 480 + 2 * 480 + 1600) / 1e12
    weights_s = cast_bytes / 2 * 3 * 8 / ep * 1600 * 480 / 1e12
    assert loop.forward_s - grouped.forward_s == pytest.approx(rows_s / 3 + weights_s - spared_s)
    assert loop.backward_s - grouped.backward_s == pytest.approx(2 * rows_s / 3 + weights_s - 2 * spared_s)
    odd = in_fp8(replace(wide, ffn_size=500), name)
    assert block_time(odd, layout, Kernels()).forward_s == block_time(odd, layout, Kernels(experts="grouped")).forward_s
    assert loop.forward_tp_s == grouped.forward_tp_s


def test_fewer_and_longer_matmuls_fill_the_machine_better():
    """Each of 8 / ep experts has 250·ep rows and three matmuls of (250·ep + 100)·600·1100 · 2 FLOPs at 50 TFLOP/s."""
    times = [forward_us(EIGHT, Layout(dp_shard=8, ep=ep), matmul_fill=100) for ep in (2, 8)]
    fewer_rows = 3 * 2 * (4 * 100 - 1 * 100) * 600 * 1100 / 50e12 / US
    assert times[0] - times[1] == pytest.approx(fewer_rows)


def test_an_all_to_all_sends_all_but_a_ranks_own_part():
    """7/8 of 1 MB at 50 GB/s; of 16 ranks 7/16 so, and meanwhile 8/16 through one card, 10 GB/s / 2."""
    assert exchange_s(scenario(EIGHT), Layout(dp_shard=8), 1e6, 1) == 0
    assert exchange_s(scenario(EIGHT), Layout(dp_shard=8, ep=8), 1e6, 1) == pytest.approx((10 + 17.5 + 5) * US)
    assert exchange_s(scenario(EIGHT), Layout(dp_shard=8, ep=8), 0.25e6, 4) == pytest.approx((10 + 17.5 + 5) * US)
    across = exchange_s(scenario(EIGHT, num_gpus=16), Layout(dp_shard=16, ep=16), 0.25e6, 4)
    assert across == pytest.approx((10 + 0.5e6 / 5e9 / US + 10) * US)


def test_a_token_that_goes_once_to_a_node_is_handed_on_there():
    """Of four copies one at least goes to the other node with 15/16; one copy is no other than before."""
    setting, copies = scenario(EIGHT, num_gpus=16), Layout(dp_shard=16, ep=16)
    once = replace(copies, ep_dispatcher="deepep")
    across = exchange_s(setting, once, 0.25e6, 4)
    assert across == pytest.approx((10 + 15 / 16 * 0.25e6 / 5e9 / US + 10) * US)
    assert across < exchange_s(setting, copies, 0.25e6, 4)
    assert exchange_s(setting, once, 1e6, 1) == pytest.approx(exchange_s(setting, copies, 1e6, 1))
    assert exchange_s(setting, replace(once, ep=8), 1e6, 4) == exchange_s(setting, replace(copies, ep=8), 1e6, 4)


def test_computing_another_microbatch_hides_what_is_exchanged():
    layout = Layout(dp_shard=8, ep=8)
    shown, hidden = (
        block_time(scenario(EIGHT, overlap=0.1), replace(layout, ep_overlap=each), Kernels()) for each in (False, True)
    )
    assert shown.forward_tp_s - hidden.forward_tp_s == pytest.approx(0.1 * shown.forward_s)
    assert shown.backward_tp_s > hidden.backward_tp_s
    all_hidden = block_time(scenario(EIGHT, overlap=1.0), replace(layout, ep_overlap=True), Kernels())
    assert all_hidden.forward_tp_s == all_hidden.backward_tp_s == 0


def test_of_one_microbatch_nothing_hides_what_is_exchanged():
    """Of m microbatches, the first forward and the last backward have no other one beside them."""
    layout = Layout(dp_shard=8, ep=8, micro_batch=8)
    setting = scenario(EIGHT, overlap=1.0)
    plain, hidden = (
        [
            estimate(replace(setting, batch=replace(setting.batch, global_batch=64 * m)), each, Kernels()).step_time_s
            for m in (1, 4)
        ]
        for each in (layout, replace(layout, ep_overlap=True))
    )
    assert hidden[0] == pytest.approx(plain[0])
    exchanged_s = 4 * 4 * block_ep_s(setting, layout)  # in four blocks, there and back, forward and backward
    assert plain[1] - hidden[1] == pytest.approx(3 * exchanged_s / 2)


def test_a_gpu_waits_for_routing_whatever_it_has_to_compute():
    """3 ms in each of the two blocks with experts, a third of it in forward; again where that is computed again."""
    setting, kernels = scenario(replace(EIGHT, dense_layers=2)), Kernels()
    waits = replace(setting, engine=setting.engine.with_constants(routing_wait_s=3e-3))
    for recompute, backward_s in (("none", 4e-3), ("selective", 4e-3), ("full", 6e-3)):
        layout = Layout(dp_shard=8, recompute=recompute)
        (quick,), (slow,) = (Estimator(each).work(layout, kernels) for each in (setting, waits))
        assert slow.host_s - quick.host_s == pytest.approx(2e-3 + backward_s)
        assert slow.forward_s - quick.forward_s == pytest.approx(2e-3)
        assert slow.backward_s - quick.backward_s == pytest.approx(backward_s)


@pytest.mark.parametrize(("ep", "wait_ms"), [(1, 3 + 8 * 0.5), (4, 3 + 2 * 0.5), (8, 3 + 0.5)])
def test_a_gpu_waits_longer_for_a_host_that_starts_more_experts(ep, wait_ms):
    times = block_time(scenario(EIGHT, routing_wait_s=3e-3, expert_wait_s=0.5e-3), Layout(dp_shard=8, ep=ep), Kernels())
    assert times.routing_wait_s == pytest.approx(wait_ms * 1e-3)
    dense = block_time(scenario(None, routing_wait_s=3e-3, expert_wait_s=0.5e-3), Layout(), Kernels())
    assert dense.routing_wait_s == 0


@pytest.mark.parametrize(("capability", "wait_ms"), [((8, 0), 7), ((9, 0), 0), ((10, 3), 0), ((12, 0), 7)])
def test_one_kernel_for_all_experts_waits_for_no_host_where_pytorch_has_one(capability, wait_ms):
    here = scenario(EIGHT, routing_wait_s=3e-3, expert_wait_s=0.5e-3)
    gpu = replace(here.cluster.gpu, capability=capability)
    there = replace(here, cluster=replace(here.cluster, gpu=gpu))
    times = block_time(there, Layout(dp_shard=8), Kernels(experts="grouped"))
    assert times.routing_wait_s == pytest.approx(wait_ms * 1e-3)


def test_the_host_needs_longer_for_a_layer_with_experts_and_longer_still_for_latent_attention():
    layout, kernels, constants = Layout(), Kernels(), {"experts_host_s": 8e-3, "latent_host_s": 6e-3}
    latent = LatentAttention(query_rank=300, kv_rank=100, rope_width=32, value_width=64)
    with_latent = replace(MODEL, num_kv_heads=10, experts=EIGHT, latent_attention=latent)
    setting = scenario(EIGHT, **constants)
    assert host_s(setting, layout, kernels) == pytest.approx(8e-3)
    assert host_s(replace(setting, model=with_latent), layout, kernels) == pytest.approx(14e-3)
    assert host_s(scenario(None, **constants), layout, kernels) == 0.0
    assert host_s(scenario(EIGHT, layer_host_s=9e-3, **constants), layout, kernels) == pytest.approx(9e-3)


@pytest.mark.parametrize(
    ("graphs", "share", "waits"), [("none", 1, True), ("attention", 0.25, True), ("full", 0, False)]
)
def test_what_starts_as_a_graph_takes_the_host_less_time(graphs, share, waits):
    features = Features(cuda_graphs=graphs)
    setting = scenario(EIGHT, features=features, experts_host_s=8e-3, graphed_share=0.25, routing_wait_s=1e-3)
    assert host_s(setting, Layout(), Kernels()) == pytest.approx(share * 8e-3)
    assert (block_time(setting, Layout(), Kernels()).routing_wait_s > 0) == waits


@pytest.mark.parametrize(
    ("query_rank", "queries"), [(300, 1000 * 300 + 300 + 300 * 10 * 100), (0, 1000 * 10 * 100)], ids=["rank", "none"]
)
def test_queries_of_latent_attention_may_come_out_of_the_hidden_state_itself(query_rank, queries):
    latent = LatentAttention(query_rank=query_rank, kv_rank=100, rope_width=32, value_width=64)
    model = replace(MODEL, num_kv_heads=10, latent_attention=latent)
    others = 1000 * (100 + 32) + 100 + 100 * 10 * (100 - 32 + 64) + 10 * 64 * 1000
    assert count_block_parameters(model) == queries + others + 3 * 1000 * 2000 + 2 * 1000


def test_biases_of_experts_are_passes_over_all_copies():
    """30 bytes for each of 2·1000·1000 elements of copies, a third of them in forward, at 1 TB/s."""
    biased = replace(EIGHT, bias=True)
    added_us = forward_us(biased, Layout(), expert_bias_traffic_bytes=30) - forward_us(EIGHT, Layout())
    assert added_us == pytest.approx(20)
    assert forward_us(biased, Layout(), expert_bias_traffic_bytes=0) == pytest.approx(forward_us(EIGHT, Layout()))
    counts = [count_block_parameters(scenario(each).model) for each in (biased, EIGHT)]
    assert counts[0] - counts[1] == 8 * (500 + 500 + 1000)


def test_experts_matmuls_may_achieve_less_than_others():
    """120 us of them."""
    assert forward_us(EIGHT, Layout(), experts_efficiency=0.5) - forward_us(EIGHT, Layout()) == pytest.approx(120)
    assert forward_us(None, Layout(), experts_efficiency=0.5) == forward_us(None, Layout())


@pytest.mark.parametrize(("tp", "copies"), [(1, 2000), (2, 1000)])
def test_copies_of_tokens_go_to_their_experts_and_back(tp, copies):
    setting, layout = scenario(EIGHT), Layout(dp_shard=8 // tp, tp=tp, ep=8)
    alone, spread = (block_time(setting, each, Kernels()) for each in (replace(layout, ep=1), layout))
    both_s = 2 * exchange_s(setting, layout, copies * 1000 * 2, 1)
    assert spread.forward_ep_s == pytest.approx(both_s)
    assert spread.forward_tp_s - alone.forward_tp_s == pytest.approx(both_s)
    assert spread.backward_tp_s - alone.backward_tp_s == pytest.approx(both_s)


def test_without_a_shared_expert_tp_sends_for_attention_alone():
    times = [block_time(scenario(each), Layout(tp=2), Kernels()) for each in (EIGHT, SHARED, None)]
    assert times[0].forward_tp_s == pytest.approx(times[1].forward_tp_s / 2)
    assert times[0].backward_tp_s == pytest.approx(times[1].backward_tp_s / 2)
    assert times[1].forward_tp_s == pytest.approx(times[2].forward_tp_s)


@pytest.mark.parametrize(("checkpointing", "share"), [("megatron", 1.0), ("torch", 0.5)])
def test_recomputation_sends_tokens_again_and_megatrons_their_results_too(checkpointing, share):
    setting = scenario(EIGHT, features=Features(checkpointing=checkpointing))
    layout, kernels = Layout(dp_shard=8, ep=8, recompute="full"), Kernels()
    block = block_time(setting, layout, kernels)
    assert recompute_time(setting, layout, kernels, block)[1] == pytest.approx(share * block.forward_ep_s)


def test_torch_does_not_compute_the_experts_last_matmul_again():
    """That of 2000 copies of a token, 500 to 1000."""
    setting = scenario(EIGHT, features=Features(checkpointing="torch"))
    layout, kernels = Layout(recompute="full"), Kernels()
    block = block_time(setting, layout, kernels)
    recompute_s, _ = recompute_time(setting, layout, kernels, block)
    assert (block.forward_s - recompute_s) / US == pytest.approx(2 * 2000 * 1000 * 500 / 50e12 / US)


@pytest.mark.parametrize(("size", "share"), [(4, 1), (2, 0.5)])
def test_each_microbatchs_gradients_are_added_to_a_sum_those_of_experts_apart(size, share):
    """10 bytes of each parameter but experts' at 1 TB/s, for a sum in fp32."""
    features = Features(gradient_bytes=size, reduce_bytes=size)
    setting, without = (scenario(EIGHT, features=features, gradient_traffic_bytes=each) for each in (10.0, 0.0))
    layout = Layout()
    for m in (1, 3):
        took, base = (
            update_times(each, layout, find_update(each, layout, 5e6, has_head=False, of_experts=4e6), 4, m, 1.0, 2.0)
            for each in (setting, without)
        )
        assert took[0] == base[0]
        assert took[1] - base[1] == pytest.approx(m * share * 10 * 1e6 / 1e12)


def test_gradients_of_experts_are_reduced_over_the_ranks_that_have_the_same():
    setting, features = scenario(EIGHT), Features(overlap_dp=False)
    setting = replace(setting, engine=replace(setting.engine, features=features))

    def dp_s(layout: Layout, n: float, of_experts: float) -> float:
        update = find_update(setting, layout, n, has_head=False, of_experts=of_experts)
        return update_times(setting, layout, update, 4, 1, 0.0, 0.0)[0]

    everywhere = Layout(dp_shard=8)
    assert dp_s(everywhere, 1e9, 0.5e9) == pytest.approx(2 * dp_s(everywhere, 0.5e9, 0))
    assert dp_s(replace(everywhere, ep=8), 1e9, 0.5e9) == dp_s(everywhere, 0.5e9, 0)  # nobody has the same
    assert 0 < dp_s(replace(everywhere, ep=4), 0.5e9, 0.5e9) < dp_s(everywhere, 0.5e9, 0)
    assert dp_s(Layout(tp=8), 1e9, 0.5e9) > dp_s(Layout(tp=8, ep=8), 1e9, 0.5e9) == 0  # tp splits no expert


@pytest.mark.parametrize(
    ("layout", "shards"),
    [
        (Layout(dp_shard=8, ep=2), 4), (Layout(dp_shard=4, tp=2, ep=8), 1), (Layout(dp_shard=4, tp=2), 8),
        (Layout(dp_replicate=8), 1), (Layout(dp_shard=4, dp_replicate=2, ep=4), 1),
    ],
)  # fmt: skip
def test_ranks_that_share_the_state_of_the_same_experts(layout, shards):
    assert count_expert_shards(layout) == shards


def test_a_rank_holds_its_part_of_the_experts_and_of_their_optimizer():
    setting, layout = scenario(EIGHT), Layout(dp_shard=8, ep=8)
    experts, dense = 4 * 8 * 3 * 1000 * 500, count_parameters(setting.model) - 4 * 8 * 3 * 1000 * 500
    (alone,), (spread,) = (estimate(setting, each, Kernels()).memory for each in (replace(layout, ep=1), layout))
    assert alone.parameters == 2 * (dense + experts)
    assert spread.parameters == 2 * (dense + experts / 8)
    assert alone.optimizer == 12 * (dense + experts) / 8
    assert spread.optimizer == pytest.approx(12 * (dense / 8 + experts / 8))  # one rank has each expert


def test_experts_keep_copies_of_what_they_read():
    """k·(h + 4·f) instead of 4·f, and the router what gate reads elsewhere; bf16, over tp."""
    for layout in (Layout(), Layout(tp=2)):
        eight, dense = (block_bytes_per_token(scenario(e), layout, Kernels()).whole for e in (EIGHT, None))
        assert eight - dense == pytest.approx(2 * (2 * (1000 + 4 * 500) - 4 * 2000) / layout.tp)


def test_first_blocks_without_experts_are_dense_ones_in_all_that_is_counted():
    mixed = replace(SHARED, dense_layers=3)
    setting, layout = scenario(mixed), Layout(pp=2)
    stages = cut(setting, layout)
    assert sum(count_stage_parameters(setting.model, stage, 1) for stage in stages) == count_parameters(setting.model)
    blocks = [count_block_parameters(replace(MODEL, experts=each)) for each in (None, mixed)]
    ends = count_parameters(MODEL) - 4 * blocks[0]
    assert count_parameters(setting.model) == 3 * blocks[0] + blocks[1] + ends
    assert [count_stage_experts(setting.model, stage, 2) for stage in stages] == [0, 8 * 3 * 1000 * 500 / 2]


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("features", [Features(), FSDP2], ids=["distributed-optimizer", "fsdp2"])
def test_stages_of_one_kind_of_block_take_and_hold_what_models_of_that_kind_do(features, recompute):
    """With four blocks in two stages: of two without experts and two with them."""
    layout, kernels = Layout(pp=2, dp_shard=4, recompute=recompute), Kernels()
    mixed, all_experts, none = (
        Estimator(scenario(each, features=features)) for each in (replace(SHARED, dense_layers=2), SHARED, None)
    )
    works = [each.work(layout, kernels) for each in (mixed, all_experts, none)]
    assert works[0] == [works[2][0], works[1][1]]
    peaks = [tuple(each.memory(layout, kernels)) for each in (mixed, all_experts, none)]
    assert peaks[0] == (peaks[2][0], peaks[1][1])


@pytest.mark.parametrize("features", [Features(), FSDP2], ids=["distributed-optimizer", "fsdp2"])
def test_a_stage_of_both_kinds_lies_between(features):
    layout, kernels = Layout(dp_shard=8, ep=4), Kernels()
    found = [
        Estimator(scenario(each, features=features))
        for each in (SHARED, *(replace(SHARED, dense_layers=n) for n in (1, 3)))
    ]
    peaks = [each.memory(layout, kernels)[0].parameters for each in found]
    assert peaks[0] > peaks[1] > peaks[2]
    seconds = [each.work(layout, kernels)[0].tp_s for each in found]  # the exchanges of 4, 3 and 1 blocks
    assert seconds == pytest.approx([seconds[2] * n for n in (4, 3, 1)])


def test_what_a_class_of_stages_stands_for_has_as_many_blocks_of_each_kind():
    setting = scenario(replace(SHARED, dense_layers=3))
    for layout in (Layout(pp=2), Layout(pp=4), Layout(pp=2, stage_layers=(1, 3))):
        for stage in cut(setting, layout):
            example = StageClass.of(stage, Recompute.parse("none"), setting.model.num_first).example
            assert setting.model.kinds(example.layers) == setting.model.kinds(stage.layers)


@pytest.mark.parametrize(
    "sizes",
    [
        {"experts": ONE}, {"experts": EIGHT}, {"experts": SHARED}, {"experts": EIGHT, "gated_ffn": False},
        LATENT, {**LATENT, "experts": SHARED}, {},
    ],
)  # fmt: skip
@pytest.mark.parametrize("recompute", ["none", "full", "keep-matmuls", "selective"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, sequence_parallel=False)], ids=str)
@pytest.mark.parametrize("regathers", [True, False])
def test_nothing_of_a_block_is_left_after_its_backward(sizes, recompute, layout, regathers):
    setting = scenario(None, features=replace(FSDP2, regathers_inputs=regathers))
    setting = replace(setting, model=replace(setting.model, **sizes))
    size, kind = Sizes(setting, layout, Kernels()), Recompute.parse(recompute)
    kept, again = size.kept(kind, 0), Recomputed(0.0, size.recomputed(kind, 0))
    weights = WeightGradients({}, pile_up=True)
    whole = sequence((block_forward(kept, size.in_forward(kind, 0)), block_backward(size, weights, kept, again)))
    assert sum(whole.left) == pytest.approx(0, abs=1e-3)
    assert sum(whole.fullest) > kept


def test_a_fsdp2_rank_gathers_its_own_experts_alone():
    """All of what is not of experts, and its own experts; an eighth of everything is its own either way."""
    setting, experts = scenario(EIGHT, features=FSDP2), 8 * 3 * 1000 * 500
    dense = count_block_parameters(setting.model) - experts
    for ep, gathered in ((1, dense + experts), (8, dense + experts / 8)):
        sharding = UnitBytes(setting, Layout(dp_shard=8, ep=ep, zero=3), Kernels())
        unit = block_unit(setting.model, 1, ep)
        assert sharding.padded(unit) == pytest.approx(gathered, rel=3e-3)  # 500 rows of k and v are padded to 504
        assert sharding.shard(unit) == pytest.approx((dense + experts) / 8, rel=3e-3)


def test_latent_attention_is_narrow_matmuls_and_attention_with_narrower_values():
    """Down to 300 and to 100 + 32, up to 10 · 96 and to 10 · (64 + 64), out of 10 · 64; scores of 96, values of 64.

    The other matmuls are those of a dense block, 240 us; what is elementwise are two more norms, 15 bytes for each of
    their 400 elements, 12 for each of 2000 in the feed-forward, and RoPE's 20 for each of 320.
    """
    setting = dense_scenario()
    setting = replace(setting, model=replace(setting.model, **LATENT))
    matmuls = 2e6 * (300 + 132 + 640) + 2e3 * (300 * 960 + 100 * 1280)
    attention = 2 * 1000 * 1000 * 10 * (96 + 64) / 2
    traffic = 1000 * (60 * 1000 + 15 * 400 + 12 * 2000 + 20 * 320)
    seconds = matmuls / 50e12 + 240 * US + attention / 50e12 + traffic / 1e12 / 3
    assert block_time(setting, Layout(), Kernels()).forward_s == pytest.approx(seconds)
    bytes_held = block_bytes_per_token(setting, Layout(), Kernels()).whole
    inputs = 2 * 1000 + 2 * 300 + 100 * 2 + 1000  # of norms and of matmuls: stream, q and kv; before attention and FFN
    kept = inputs + 1000 + 10 * (96 + 96 + 64 + 64) + 4 * 2000
    assert bytes_held == 2 * kept + 4 * 10


def test_a_ring_sends_keys_and_values_as_wide_as_they_are():
    setting = dense_scenario()
    latent = replace(setting, model=replace(setting.model, **LATENT))
    times = [block_time(each, Layout(cp=2, micro_batch=8), Kernels()).forward_tp_s for each in (setting, latent)]
    assert times[1] > times[0] >= 0  # 10 · 160 instead of 10 · 100


def test_the_fullest_rank_computes_and_gets_more_than_the_mean():
    """1.5 times as many rows, copies that are put in order and activations; ranks that have all experts are even."""
    even, uneven = (
        scenario(EIGHT, experts_efficiency=0.5),
        scenario(replace(EIGHT, imbalance=1.5), experts_efficiency=0.5),
    )
    layout = Layout(dp_shard=8, ep=4)
    assert block_ep_s(uneven, layout) > block_ep_s(even, layout)
    start_s = exchange_s(even, layout, 0.0, 2)
    sent_s = [block_ep_s(each, layout) / 2 - start_s for each in (even, uneven)]
    assert sent_s[1] == pytest.approx(1.5 * sent_s[0])
    times = [block_time(each, layout, Kernels()) for each in (even, uneven)]
    assert times[1].last_matmul_s == pytest.approx(1.5 * times[0].last_matmul_s)
    assert block_time(even, Layout(), Kernels()) == block_time(uneven, Layout(), Kernels())


@pytest.mark.parametrize("features", [Features(), FSDP2])
def test_the_fullest_rank_holds_more_copies_of_tokens(features):
    even, uneven = (scenario(replace(EIGHT, imbalance=each), features=features) for each in (1.0, 1.5))
    layout = Layout(dp_shard=8, ep=4)
    held = [block_bytes_per_token(each, layout, Kernels()).whole for each in (even, uneven)]
    copies = 2 * 2 * (1000 + 4 * 500)  # two of each token: what experts read, and the same inside
    assert held[1] - held[0] == pytest.approx(0.5 * copies)
    assert block_bytes_per_token(even, Layout(), Kernels()) == block_bytes_per_token(uneven, Layout(), Kernels())
