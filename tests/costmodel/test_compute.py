"""Seconds of blocks and heads, against numbers computed by hand; tokens of a microbatch, heads and widths are round."""

from dataclasses import replace
from math import inf

import pytest
from small import GPU, US, scenario

from dtlayout.costmodel.attention import attention_s
from dtlayout.costmodel.compute import block_time, block_tp_s, head_time, host_s
from dtlayout.costmodel.engine_features import Features
from dtlayout.costmodel.operators import linear_s, matmul_s
from dtlayout.costmodel.recomputation import recompute_time
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.families import describe
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import Precision

TP2, TP2_SP = Layout(tp=2, sequence_parallel=False), Layout(tp=2)
HALF_S = (10 + 20 + 5) * US
"""start, half of 1000·1000·2 byte at 50 GB/s, one hop"""


def test_a_large_matmul_is_bound_by_flops():
    assert matmul_s(scenario(), 1000, 1000, 1000) == pytest.approx(2e9 / 50e12)


def test_a_large_matmul_in_fp16_has_the_peak_of_fp16_where_that_is_another():
    halves = replace(scenario(), precision=Precision(compute="float16"))
    gpu = replace(GPU, peak_fp16_flops_per_s=200e12)
    assert matmul_s(halves, 1000, 1000, 1000) == matmul_s(scenario(), 1000, 1000, 1000)
    faster = replace(halves, cluster=replace(halves.cluster, gpu=gpu))
    assert matmul_s(faster, 1000, 1000, 1000) == pytest.approx(2e9 / 100e12)


def test_a_thin_matmul_is_bound_by_memory():
    assert matmul_s(scenario(), 1, 1000, 1000) == pytest.approx(2 * (1000 + 1_000_000 + 1000) / 1e12)


def test_each_size_of_a_matmul_is_lengthened():
    assert matmul_s(scenario(matmul_fill=100), 1000, 900, 1900) == pytest.approx(2 * 1100 * 1000 * 2000 / 50e12)


def in_format(name: str, **constants: float) -> Scenario:
    gpu = replace(GPU, peak_fp8_flops_per_s=200e12, peak_fp4_flops_per_s=400e12)
    found = scenario(fp8_efficiency=0.5, fp4_efficiency=0.25, **constants)
    return replace(found, cluster=replace(found.cluster, gpu=gpu), precision=Precision(matmuls=name))


def test_a_linear_layer_below_bf16_has_its_formats_peak_and_fills_it_as_slowly():
    assert linear_s(scenario(), 1000, 1000, 1000) == matmul_s(scenario(), 1000, 1000, 1000)
    assert linear_s(in_format("fp8-tensorwise"), 1000, 1000, 1000) == pytest.approx(2e9 / 100e12)
    assert linear_s(in_format("nvfp4", matmul_share=0.5), 1000, 1000, 1000) == pytest.approx(2e9 / 50e12)
    filled = linear_s(in_format("mxfp8", matmul_fill=100), 1000, 900, 1800)
    assert filled == pytest.approx(2 * 1100 * 1000 * 2000 / 100e12)
    assert linear_s(replace(in_format("nvfp4"), cluster=scenario().cluster), 10, 10, 10) == inf


@pytest.mark.parametrize(
    ("layout", "elements"),
    [
        # Read: 1000 by q, k, v and by o, 1000 by gate and up, 2000 by down; and gradients of what all of them give.
        (Layout(), 13_000),
        # Over tp all but what a branch reads first and gives last; under sequence parallelism that too.
        (TP2, 13_000 / 2 + 4000 / 2),
        (TP2_SP, 13_000 / 2),
    ],
)
def test_what_a_linear_layer_reads_and_gradients_of_what_it_gives_are_cast(layout, elements):
    plain, cast = (block_time(each, layout, Kernels()) for each in (scenario(), in_format("fp8-tensorwise")))
    matmuls_s = 360 * US / layout.tp  # in fp8 half of that
    casts_s = 6 * elements * 1000 / 1e12
    assert cast.forward_s == pytest.approx(plain.forward_s - matmuls_s / 2 + casts_s / 3)
    assert cast.backward_s == pytest.approx(plain.backward_s - matmuls_s + casts_s * 2 / 3)


@pytest.mark.parametrize(
    ("name", "kernels", "forward", "backward"),
    [  # bytes of an element: read for its scales, copied in fp32, passes over that, its values
        ("int8", Kernels(), 2 + 6 + 4 * 8 + 6, 6 + 4 * 8 + 6),
        ("int4", Kernels(), 2 + 6 + 7 * 8 + 6, 6 + 7 * 8 + 6),
        ("int4", Kernels(compile="blocks"), 2 + 4, 4),
    ],
)
def test_weights_are_rounded_in_passes_for_each_microbatch(name, kernels, forward, backward):
    plain = scenario()
    rounded = replace(plain, precision=Precision(fake_quant=name))
    for layout in (Layout(), TP2_SP):
        once, again = (block_time(each, layout, kernels) for each in (plain, rounded))
        weights = sum(w.numel for w in describe(plain.model).block_weights if w.split is not None) / layout.tp
        assert again.forward_s - once.forward_s == pytest.approx(forward * weights / 1e12)
        assert again.backward_s - once.backward_s == pytest.approx(backward * weights / 1e12)
        added_s = again.forward_tp_s - once.forward_tp_s
        assert (added_s > 0) == (name == "int8" and layout.tp > 1) and again.backward_tp_s == once.backward_tp_s


def test_what_sequence_parallelism_gathers_is_cast_before_and_what_is_summed_is_not():
    quarter_s = HALF_S - 10 * US
    found = block_tp_s(in_format("fp8-tensorwise"), TP2_SP)
    assert found == pytest.approx((2 * HALF_S + 2 * quarter_s, 2 * HALF_S + 4 * quarter_s))
    assert block_tp_s(in_format("fp8-tensorwise"), TP2) == block_tp_s(scenario(), TP2)


WIDE = replace(scenario().model, hidden_size=1600, ffn_size=3200)
"""With sizes that 16 divides, on two ranks of tp too."""


def own(setting: Scenario) -> Scenario:
    """The scenario with an engine that casts as our trainer does."""
    features = replace(setting.engine.features, casts_itself=True, gathers_cast=("activations",))
    return replace(setting, engine=replace(setting.engine, features=features))


@pytest.mark.parametrize(("name", "cast_bytes"), [("fp8-tensorwise", 3), ("fp8-rowwise", 5)])
def test_our_trainer_casts_weights_every_time_and_layers_that_16_divides(name, cast_bytes):
    narrow = in_format(name)
    assert block_time(own(narrow), Layout(), Kernels()) == block_time(scenario(), Layout(), Kernels())
    wide = replace(narrow, model=WIDE)
    others, ours = (block_time(each, Layout(), Kernels()) for each in (wide, own(wide)))
    num_weights = 2 * 1600 * 1600 + 2 * 1600 * 800 + 3 * 1600 * 3200
    again = 1000 * (2 + 1) * 1600  # the norms' results for k, v and up too, in both orders: a third of it in forward
    for direction, thirds in (("forward_s", 1), ("backward_s", 2)):
        more_s = getattr(ours, direction) - getattr(others, direction)
        assert more_s == pytest.approx(cast_bytes * (num_weights + thirds / 3 * 2 * again) / 1e12)
    compiled = [block_time(each, Layout(), Kernels(compile="blocks")).forward_s for each in (wide, own(wide))]
    assert compiled[1] - compiled[0] == pytest.approx(cast_bytes * num_weights / 1e12)


def test_our_trainer_tells_tp_largest_numbers_for_one_scale_and_gathers_bf16_for_scales_of_rows():
    each_s = 2 * (10 + 5) * US  # an all-reduce of next to nothing
    tensorwise, rowwise = (replace(in_format(name), model=WIDE) for name in ("fp8-tensorwise", "fp8-rowwise"))
    # Before seven matmuls, of which tp splits five by outputs; before two gathers in either direction.
    more_s = [o - t for o, t in zip(*(block_tp_s(f, TP2_SP) for f in (own(tensorwise), tensorwise)), strict=True)]
    assert more_s == pytest.approx([9 * each_s, 7 * each_s], rel=1e-3)
    in_bf16 = replace(rowwise, precision=Precision())
    assert block_tp_s(own(rowwise), TP2_SP) == block_tp_s(in_bf16, TP2_SP)
    assert block_tp_s(own(rowwise), TP2) == block_tp_s(in_bf16, TP2)


def test_a_program_may_keep_a_share_of_the_matmuls_it_is_to_keep():
    setting = scenario(features=Features(checkpointing="torch", kept_matmuls=0.25))
    layout = Layout(recompute="selective")
    block = block_time(setting, layout, Kernels())
    recompute_s, _ = recompute_time(setting, layout, Kernels(), block)
    assert recompute_s == pytest.approx((104 / 3 + 0.75 * 280) * US)


@pytest.mark.parametrize(
    ("kernel", "forward_us", "backward_us"),
    [
        ("sdpa-flash", 40, 100),  # 4·T·s·h FLOPs, of which the mask hides half, at half of the peak; 2.5 times backward
        ("flash-attn", 40, 100),
        ("sdpa-cudnn", 25, 62.5),
        ("fa3", 25, 62.5),
        ("sdpa-efficient", 80, 200),
        ("flash1", 100, 250),
        ("torch", 80 + 200, 160 + 300),  # all FLOPs as matmuls, and 20 byte for each of 10·1000·1000 scores
        ("sdpa-math", 80 + 200, 160 + 300),
        ("megatron-softmax", 80 + 20, 160 + 30),
    ],
)
def test_attention(kernel, forward_us, backward_us):
    kernels = Kernels(attention=kernel)
    found = attention_s(scenario(), Layout(), kernels)
    assert found == pytest.approx((forward_us * US, backward_us * US))
    for split in (Layout(tp=2), Layout(cp=2)):
        assert attention_s(scenario(), split, kernels) == pytest.approx((forward_us * US / 2, backward_us * US / 2))
    twice = attention_s(scenario(), Layout(micro_batch=2), kernels)
    assert twice == pytest.approx((forward_us * US * 2, backward_us * US * 2))


@pytest.mark.parametrize(("num_heads", "times"), [(5, 1), (10, 4), (2, 4)])
def test_products_with_scores_in_memory_are_slower_where_16_does_not_divide_the_bytes_of_a_heads_row(num_heads, times):
    """Heads of 200, 100 and 500 numbers, two bytes each."""
    odd, other = scenario(odd_scores_share=0.25), scenario()
    model = replace(odd.model, num_heads=num_heads, num_kv_heads=num_heads)
    assert model.head_width == 1000 / num_heads
    odd, other = replace(odd, model=model), replace(other, model=model)
    passes_s = num_heads * 1000 * 1000 * 20 / 1e12
    for kernel, moved_s in (("torch", passes_s), ("megatron-softmax", passes_s / 10)):
        (slow_s, slow_again_s), (forward_s, backward_s) = (
            attention_s(each, Layout(), Kernels(attention=kernel)) for each in (odd, other)
        )
        assert slow_s - moved_s == pytest.approx(times * (forward_s - moved_s))
        assert slow_again_s - 1.5 * moved_s == pytest.approx(times * (backward_s - 1.5 * moved_s))
    flash = Kernels(attention="sdpa-flash")
    assert attention_s(odd, Layout(), flash) == attention_s(other, Layout(), flash)


@pytest.mark.parametrize(("kernel", "share"), [("sdpa-flash", (1 + 2 * 0.1 - 0.1**2) / 2), ("torch", 1)])
def test_flash_kernels_skip_what_a_window_hides_in_every_other_block(kernel, share):
    """100 of 1000 tokens: 0.1·s² - 0.005·s² of the s²/2 scores below the mask."""
    whole = scenario()
    windowed = replace(whole, model=replace(whole.model, window=100))
    times = [attention_s(each, Layout(), Kernels(attention=kernel)) for each in (windowed, whole)]
    assert times[0] == pytest.approx([share * each for each in times[1]])
    longer = replace(whole, model=replace(whole.model, window=1000))
    assert attention_s(longer, Layout(), Kernels(attention=kernel)) == times[1]


def test_a_block_is_matmuls_attention_and_passes_over_memory():
    """Matmuls 80 (qkv) + 40 (o) + 3 · 80 (FFN); elementwise 104 MB, (80·h + 12·f) · T, a third of it in forward."""
    found = block_time(scenario(), Layout(), Kernels())
    assert found.forward_s == pytest.approx((360 + 40 + 104 / 3) * US)
    assert found.backward_s == pytest.approx((720 + 100 + 208 / 3) * US)
    assert (found.forward_tp_s, found.backward_tp_s) == (0, 0)


@pytest.mark.parametrize(
    ("recompute", "us", "halves"),
    [
        # Matmuls 280 without down, attention 40, elementwise 104 / 3; with sequence parallelism, over tp = 2.
        ("full", (280 + 40 + 104 / 3) / 2, 3),
        ("keep-attention", (280 + 104 / 3) / 2, 2),
        ("keep-matmuls", (40 + 104 / 3) / 2, 2),
        ("selective", 104 / 3 / 2, 2),
    ],
)
def test_a_block_computed_again(recompute, us, halves):
    found = time_again(Layout(tp=2, recompute=recompute), "torch")
    assert found == pytest.approx((us * US, halves * HALF_S))


def test_megatron_computes_all_of_a_block_again_or_attention_alone():
    full, selective = (time_again(Layout(tp=2, recompute=r), "megatron") for r in ("full", "selective"))
    assert full == pytest.approx(((360 + 40 + 104 / 3) / 2 * US, 4 * HALF_S))
    assert selective == pytest.approx((20 * US, 0))


def test_a_compiled_block_is_computed_again_to_its_end():
    kernels = Kernels(compile="blocks")
    block = block_time(scenario(), TP2_SP, kernels)
    assert time_again(replace(TP2_SP, recompute="full"), "torch", kernels) == (block.forward_s, block.forward_tp_s)
    assert time_again(replace(TP2_SP, recompute="selective"), "torch", kernels)[0] < block.forward_s / 2


def test_kept_matmuls_of_attention_leave_its_softmax_to_be_computed_again():
    """200 us of moving scores; 104 / 3 elsewhere."""
    found = time_again(Layout(recompute="selective"), "torch", Kernels(attention="sdpa-math"))
    assert found == pytest.approx(((200 + 104 / 3) * US, 0))


@pytest.mark.parametrize(
    ("recompute", "share"), [("full", 1), ("keep-matmuls", 1), ("keep-attention", 0), ("selective", 0)]
)
@pytest.mark.parametrize("method", ["ring", "gather", "all-to-all"])
def test_what_cp_sends_is_sent_again_with_attention_and_always_around_it(recompute, share, method):
    layout = Layout(cp=4, cp_method=method, recompute=recompute)
    sent_s = block_time(scenario(), layout, Kernels()).forward_tp_s
    assert sent_s > 0
    assert time_again(layout, "torch")[1] == pytest.approx((1 if method == "all-to-all" else share) * sent_s)


def time_again(layout: Layout, checkpointing: str, kernels: Kernels | None = None) -> tuple[float, float]:
    kernels = kernels or Kernels()
    setting = scenario(features=Features(checkpointing=checkpointing))
    return recompute_time(setting, layout, kernels, block_time(setting, layout, kernels))


def test_an_eager_norm_adds_traffic_and_the_start_of_its_kernels():
    fused, eager = (block_time(scenario(), Layout(), Kernels(norm=norm)) for norm in ("fused", "eager"))
    assert eager.forward_s - fused.forward_s == pytest.approx((100 / 3 + 50) * US)
    assert eager.backward_s - fused.backward_s == pytest.approx((200 / 3 + 100) * US)


@pytest.mark.parametrize(
    "kernels", [Kernels(rope="liger"), Kernels(compile="blocks"), Kernels(compile="model")], ids=str
)
def test_a_rotary_embedding_in_one_kernel_moves_20_bytes_however_much_separate_operations_would(kernels):
    """80 bytes of 120 a unit of width are left, of 10⁶ units at 1 TB/s."""
    slow = scenario(rope_traffic_bytes=60.0)
    eager, fused = block_time(slow, Layout(), Kernels()), block_time(slow, Layout(), kernels)
    assert eager.forward_s - fused.forward_s == pytest.approx(40 / 3 * US)
    assert eager.backward_s - fused.backward_s == pytest.approx(80 / 3 * US)


def test_compiled_blocks_fuse_eager_norms():
    compiled = block_time(scenario(), Layout(), Kernels(norm="eager", compile="blocks"))
    assert compiled == block_time(scenario(), Layout(), Kernels(norm="fused", compile="blocks"))


def test_a_linear_loss_has_all_its_matmuls_in_forward_and_adds_the_weights_gradient_up_over_chunks():
    """1000 tokens are two chunks: 40 MB of 10⁷ weights' gradients are read and written for each."""
    whole, linear = (head_time(scenario(), Layout(), Kernels(loss=loss)) for loss in ("eager", "linear"))
    assert linear.forward_s == pytest.approx(whole.forward_s + whole.backward_s + 2 * 2 * 2 * 1e7 / 1e12)
    assert linear.backward_s == 0.0
    assert head_time(scenario(), Layout(), Kernels(loss="chunked")) == whole


def test_tp_splits_matmuls_and_attention_and_only_with_sequence_parallelism_the_norms():
    plain, sharded = (block_time(scenario(), layout, Kernels()) for layout in (TP2, TP2_SP))
    assert plain.forward_s == pytest.approx((180 + 20 + (60 + 22) / 3) * US)
    assert sharded.forward_s == pytest.approx((180 + 20 + (30 + 22) / 3) * US)


@pytest.mark.parametrize(
    ("layout", "features", "forward", "backward"),
    [
        (TP2, Features(), 4, 4),  # two all-reduces each way, of two halves
        (TP2, Features(input_reductions=3), 4, 6),  # q, k and v together, gate and up apart
        (TP2_SP, Features(), 4, 6),  # gather gradients, scatter sums, gather inputs again: two each
        (TP2_SP, Features(regathers_inputs=False), 4, 4),
        (TP2_SP, Features(regathers_inputs=False, input_reductions=3), 4, 5),
    ],
)
def test_collectives_of_a_block(layout, features, forward, backward):
    found = block_tp_s(scenario(features=features), layout)
    assert found == pytest.approx((forward * HALF_S, backward * HALF_S))
    assert block_tp_s(scenario(features=features, tp_exposed=0.4), layout) == found  # nothing is overlapped
    ahead = replace(features, runs_ahead=True)
    hidden = block_tp_s(scenario(features=ahead, tp_exposed=0.4), layout)
    assert hidden == pytest.approx((0.4 * forward * HALF_S, 0.4 * backward * HALF_S))


def test_overlap_hides_what_matmuls_last_and_pays_for_more_messages():
    """Four pieces of 10 + 20 / 4 + 5 µs beside the matmuls: 40 (qkv), 20 (o), 80 (gate and up), 40 (down).

    Forward they wait for 90 - 40, 85 - 20, 100 - 80 and 90 - 40; backward for o's and down's as much, and for the
    others' nothing but what the weights' gradients leave of 50 and 20.
    """
    overlapped = replace(TP2_SP, tp_overlap=True)
    found = block_tp_s(scenario(features=Features(regathers_inputs=False)), overlapped)
    assert found == pytest.approx(((50 + 65 + 20 + 50) * US, (65 + 50 + 10 + 0) * US))
    on_host = replace(scenario(), cluster=replace(scenario().cluster, gpu=replace(GPU, name="cpu")))
    assert block_tp_s(on_host, overlapped) == block_tp_s(on_host, TP2_SP)
    large = replace(scenario(), batch=replace(scenario().batch, global_batch=64))
    grown = replace(overlapped, micro_batch=16)
    assert sum(block_tp_s(large, grown)) < 0.5 * sum(block_tp_s(large, replace(grown, tp_overlap=False)))


@pytest.mark.parametrize("name", ["fp8-tensorwise", "fp8-rowwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_no_more_is_hidden_than_is_sent_in_any_format(name, tp):
    shown, hidden = (
        block_tp_s(in_format(name), Layout(tp=tp, tp_overlap=each, micro_batch=64)) for each in (False, True)
    )
    assert all(0 <= less < more for less, more in zip(hidden, shown, strict=True))


def test_cp_waits_for_what_attention_does_not_hide_of_keys_and_values():
    """1 MB of them at 50 GB/s and 5 µs a hop, behind half of 20 µs; backward 2 MB behind half of 50 µs."""
    kernels = Kernels()
    found = block_time(scenario(), Layout(cp=2), kernels)
    assert (found.forward_tp_s, found.backward_tp_s) == pytest.approx(((25 - 10) * US, (45 - 25) * US))
    fast = block_time(scenario(flash2_efficiency=0.2), Layout(cp=2), kernels)  # attention takes 50 and 125 µs
    assert (fast.forward_tp_s, fast.backward_tp_s) == (0, 0)


def test_gradients_that_an_fsdp2_engine_sums_go_round_in_fp32():
    """1 MB of keys and values and 2 MB of their gradients at 50 GB/s and 5 µs, behind half of 50 µs."""
    found = block_time(scenario(features=Features(sharding="fsdp2")), Layout(cp=2), Kernels())
    assert found.backward_tp_s == pytest.approx((20 + 40 + 5 - 25) * US)


def test_nothing_hides_what_is_gathered_or_exchanged():
    """Half of 2 MB of keys and values, gathered twice and scattered; half of 3 MB in and out of attention, in two."""
    gathered = block_time(scenario(), Layout(cp=2, cp_method="gather"), Kernels())
    assert (gathered.forward_tp_s, gathered.backward_tp_s) == pytest.approx((HALF_S, 2 * HALF_S))
    exchanged = block_time(scenario(), Layout(cp=2, cp_method="all-to-all"), Kernels())
    assert exchanged.forward_tp_s == exchanged.backward_tp_s == pytest.approx((2 * (10 + 5) + 30) * US)


def test_without_tp_nothing_is_sent():
    assert block_tp_s(scenario(), Layout(dp_shard=8)) == (0, 0)


def test_a_vocabulary_parallel_loss_passes_over_its_share_of_the_logits():
    """10⁷ logits: 400 µs as a matmul, 50 byte each in the loss."""
    alone, shared = head_time(scenario(), Layout(), Kernels()), head_time(scenario(), TP2, Kernels())
    assert (alone.forward_s, alone.backward_s) == pytest.approx((650 * US, 1050 * US))
    assert (shared.forward_s, shared.backward_s) == pytest.approx((325 * US, 525 * US))
    assert (shared.forward_tp_s, shared.backward_tp_s) == pytest.approx((0, 2 * HALF_S))


def test_a_replicated_loss_gathers_the_logits_and_passes_over_all_of_them():
    found = head_time(scenario(features=Features(loss="replicated")), TP2, Kernels())
    assert (found.forward_s, found.backward_s) == pytest.approx((450 * US, 650 * US))
    assert found.forward_tp_s == pytest.approx((10 + 200 + 5) * US)  # half of 20 MB at 50 GB/s


def test_the_host_starts_collectives_too_and_waits_for_messages_between_nodes():
    times = {"layer_host_s": 1e-3, "layer_host_tp_s": 4e-3, "layer_host_message_s": 2e-3}
    assert host_s(scenario(**times), Layout(pp=16), Kernels()) == pytest.approx(1e-3)
    assert host_s(scenario(**times), Layout(tp=4), Kernels()) == pytest.approx(4e-3)
    assert host_s(scenario(**times), Layout(tp=4, pp=2), Kernels()) == pytest.approx(4e-3)  # one node
    assert host_s(scenario(**times), Layout(tp=4, pp=4), Kernels()) == pytest.approx(12e-3)


@pytest.mark.parametrize(("choice", "found_s"), [("none", 4e-3), ("loss", 4e-3), ("blocks", 5e-4), ("model", 5e-4)])
def test_the_host_starts_fewer_kernels_of_compiled_blocks(choice, found_s):
    times = {"layer_host_s": 1e-3, "layer_host_tp_s": 4e-3, "compiled_host_s": 5e-4}
    assert host_s(scenario(**times), TP2, Kernels(compile=choice)) == pytest.approx(found_s)
    less = {**times, "layer_host_tp_s": 1e-4}  # a calibrated host that is faster yet
    assert host_s(scenario(**less), TP2, Kernels(compile=choice)) == pytest.approx(1e-4)


def test_cuda_graphs_of_blocks_take_the_hosts_starts_away():
    times = scenario(layer_host_s=1e-3, compiled_host_s=5e-4)
    compiled = Kernels(compile="blocks")
    for mode in ("reduce-overhead", "max-autotune"):
        assert host_s(times, Layout(), replace(compiled, compile_mode=mode)) == 0
        assert host_s(times, Layout(), Kernels(compile="loss", compile_mode=mode)) == pytest.approx(1e-3)
    for mode in ("default", "max-autotune-no-cudagraphs"):
        assert host_s(times, Layout(), replace(compiled, compile_mode=mode)) == pytest.approx(5e-4)
