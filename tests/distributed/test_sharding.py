"""What the ZeRO stages and axes do to collectives and bytes, and that the parity harness sees what is missing."""

import math
from dataclasses import replace

import numpy as np
import pytest
from codes import needs_codes
from memory_ranks import make_scenario
from parity import FP32, SEED, SEQ_LEN, SHAPE, TIED, Case, largest_difference, merge, run_reference
from ranks import Ranks
from sharding import (
    count_collectives,
    initial_weights,
    list_exchanges,
    measure_bytes,
    run_sabotaged,
    train_in_two_groups,
    weigh_collectives,
)
from thorough import mostly_thorough, thorough

from dtlayout.costmodel.comm import copied_bytes, count_exchanges
from dtlayout.models.counting import count_block_parameters, count_embedding_parameters
from dtlayout.models.families import describe
from dtlayout.models.llama import Llama
from dtlayout.plans.init import initialize
from dtlayout.plans.plan import OVERLAPPED_PIECES
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.kernels import count_loss_chunks
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts
from dtlayout.spec.recompute import Recompute

DATA = ("dp_replicate", "dp_shard")
LOSS_SUMS = 2 * count_loss_chunks(4 * SEQ_LEN)
"""All-reduces of the loss for a microbatch of four samples: the largest logit and the sums, chunk by chunk."""


@pytest.mark.parametrize("model", [SHAPE, thorough(TIED)], ids=["untied", "tied"])
@pytest.mark.parametrize("schedule", ["", "1f1b", thorough("gpipe"), "interleaved-1f1b"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_each_zero_stage_sends_what_its_definition_says(ranks4: Ranks, zero: int, schedule: str, model) -> None:
    pp, chunks = (2 if schedule else 1), (3 if schedule.startswith("interleaved") else 1)
    layout = Layout(pp=pp, dp_shard=4 // pp, schedule=schedule or "1f1b", virtual_stages=chunks, zero=zero)  # type: ignore[arg-type]
    case = Case(layout, model=model)
    m = case.layout.num_microbatches(case.batch)
    units = (case.model.num_layers + 2) // pp  # blocks, the embedding, norm and head
    if model is TIED and pp == 1:
        units -= 1  # both ends belong to the root
    for rank, counts in enumerate(ranks4.run(count_collectives, case, DATA)):
        has_head = rank // (4 // pp) == pp - 1
        assert counts == {
            "all_gather": {1: units, 2: units, 3: m * (2 * units - has_head)}[zero],
            "reduce_scatter": {1: units, 2: m * units, 3: m * units}[zero],
        }


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hsdp_sums_over_its_replicas_once_a_step(ranks4: Ranks, zero: int) -> None:
    case = Case(Layout(dp_replicate=2, dp_shard=2, zero=zero))  # type: ignore[arg-type]
    for counts in ranks4.run(count_collectives, case, DATA):
        assert counts["all_reduce"] == SHAPE.num_layers + 2


@pytest.mark.parametrize(
    "layout",
    [
        thorough(Layout(dp_shard=2, tp=2, micro_batch=2, zero=3)),
        Layout(pp=2, dp_shard=2, schedule="interleaved-1f1b", virtual_stages=3, zero=2),
    ],
    ids=str,
)
def test_gradients_are_reduced_in_a_group_of_their_own(ranks4: Ranks, layout: Layout) -> None:
    outcomes, groups = zip(*ranks4.run(train_in_two_groups, Case(layout)), strict=True)
    size, name = largest_difference(merge(outcomes), run_reference(Case(layout)))
    assert size < 1e-10, name
    for found in groups:
        (gathers, gather_name, gather_ranks), (reduces, reduce_name, reduce_ranks) = sorted(found)
        assert ("gather" in gathers, "reduce" in reduces) == (True, True)
        assert gather_name != reduce_name and gather_ranks == reduce_ranks and len(gather_ranks) == 2


@pytest.mark.parametrize("base", ["compute", pytest.param("nf4", marks=needs_codes)])
def test_of_an_adapted_model_gradients_of_the_adapter_alone_are_reduced(ranks4: Ranks, base: str) -> None:
    """And gathered is what is stored: all weights of the base, in few bits where it is quantized."""
    model = replace(SHAPE, hidden_size=128, ffn_size=128, adapter=Adapter(rank=4))
    case = Case(Layout(dp_shard=4, zero=2), model=model, precision=replace(FP32, base=base))
    blocks = [weight for kind, n in model.kinds(range(model.num_layers)) for weight in describe(kind).block_weights * n]
    trained = sum(weight.numel for weight in blocks if weight.trains)
    frozen = sum(weight.numel for weight in blocks if not weight.trains)
    linear = sum(weight.numel for weight in blocks if not weight.trains and weight.role == "matrix")
    kept = 4 * (frozen - linear) + linear * (4 if base == "compute" else (4 + 32 / 64) / 8)
    ends = 4 * (2 * count_embedding_parameters(model) + model.hidden_size)
    m = case.layout.num_microbatches(case.batch)
    for sent in ranks4.run(weigh_collectives, case, DATA):
        assert sent["reduce_scatter"] == 4 * m * trained
        assert sent["all_gather"] == 4 * trained + kept + ends


def test_sequence_parallelism_gathers_and_scatters_twice_a_block_in_each_direction(ranks4: Ranks) -> None:
    case = Case(Layout(tp=4, micro_batch=4))
    m, blocks = 2, SHAPE.num_layers
    norms = 2 * blocks + 1
    for counts in ranks4.run(count_collectives, case, ("tp",)):
        assert counts == {
            # forward and backward: two a block; the head's input and the embedding's gradient
            "all_gather": m * (2 * 2 * blocks + 2),
            "reduce_scatter": m * (2 * 2 * blocks + 2),
            "all_reduce": m * LOSS_SUMS + norms,  # a norm's weight gradient once a step
        }


def test_tensor_parallelism_alone_sums_twice_a_block_in_each_direction(ranks4: Ranks) -> None:
    case = Case(Layout(tp=4, micro_batch=4, sequence_parallel=False))
    m, blocks = 2, SHAPE.num_layers
    for counts in ranks4.run(count_collectives, case, ("tp",)):
        assert counts == {"all_reduce": m * (2 * 2 * blocks + 2 + LOSS_SUMS)}  # 2: embedding, head's input


def test_overlapped_messages_are_the_same_bytes_in_pieces(ranks4: Ranks) -> None:
    m, blocks = 2, SHAPE.num_layers
    whole, pieces = (Case(Layout(tp=4, micro_batch=4, tp_overlap=overlap)) for overlap in (False, True))
    assert ranks4.run(weigh_collectives, pieces, ("tp",)) == ranks4.run(weigh_collectives, whole, ("tp",))
    for counts in ranks4.run(count_collectives, pieces, ("tp",)):
        for name in ("all_gather", "reduce_scatter"):
            assert counts[name] == m * (OVERLAPPED_PIECES * 4 * blocks + 2)  # 2: embedding, head's input


@pytest.mark.parametrize(
    ("recompute", "gathers", "scatters"),
    [("full", 2, 1), thorough(("keep-attention", 2, 0)), thorough(("keep-matmuls", 2, 0)), ("selective", 2, 0)],
)
def test_recomputation_sends_again_what_it_needs_and_does_not_keep(
    ranks4: Ranks, recompute: str, gathers: int, scatters: int
) -> None:
    """In full: all but the reduction after a block's last matmul, of which backward needs nothing."""
    m, blocks = 2, SHAPE.num_layers
    for counts in ranks4.run(count_collectives, Case(Layout(tp=4, micro_batch=4, recompute=recompute)), ("tp",)):
        assert counts["all_gather"] == m * ((4 + gathers) * blocks + 2)
        assert counts["reduce_scatter"] == m * ((4 + scatters) * blocks + 2)
    whole = Layout(tp=4, micro_batch=4, recompute=recompute, sequence_parallel=False)
    for counts in ranks4.run(count_collectives, Case(whole), ("tp",)):
        assert counts == {"all_reduce": m * ((4 + scatters) * blocks + 2 + LOSS_SUMS)}


KV_BYTES = 2 * 2 * (SEQ_LEN // 2) * SHAPE.num_kv_heads * SHAPE.head_width * 4
"""Of a cp rank's keys and values of two samples in fp32, the half of the sequence that is its own."""
QUERY_BYTES = KV_BYTES // 2 * SHAPE.num_heads // SHAPE.num_kv_heads
CONTEXT_BYTES = {
    # All in a block of a microbatch, forward and backward. A ring has one hop over two ranks; a gathered tensor is
    # twice as large as what a rank has.
    "ring": {"all_to_all": 3 * KV_BYTES},
    "gather": {"all_gather": 2 * 2 * KV_BYTES, "reduce_scatter": 2 * KV_BYTES},
    "all-to-all": {"all_to_all": 2 * (KV_BYTES + 2 * QUERY_BYTES)},
}
CONTEXT_COUNTS = {
    "ring": {"all_to_all": 3}, "gather": {"all_gather": 2, "reduce_scatter": 1}, "all-to-all": {"all_to_all": 4}
}  # fmt: skip


@pytest.mark.parametrize("method", CONTEXT_COUNTS)
def test_cp_sends_in_each_block_what_its_method_says(ranks4: Ranks, method: str) -> None:
    case = Case(Layout(dp_shard=2, cp=2, cp_method=method, micro_batch=2), precision=FP32)
    times = 2 * SHAPE.num_layers  # microbatches and blocks
    for counts in ranks4.run(count_collectives, case, ("cp",)):
        assert counts == {name: times * count for name, count in CONTEXT_COUNTS[method].items()}
    for weights in ranks4.run(weigh_collectives, case, ("cp",)):
        assert weights == {name: times * size for name, size in CONTEXT_BYTES[method].items()}


@pytest.mark.parametrize("recompute", ["full", thorough("keep-matmuls"), thorough("keep-attention"), "selective"])
@pytest.mark.parametrize("method", CONTEXT_COUNTS)
def test_what_cp_sends_in_forward_is_sent_again_unless_its_result_is_kept(
    ranks4: Ranks, method: str, recompute: str
) -> None:
    again = {"ring": {"all_to_all": 1}, "gather": {"all_gather": 1}, "all-to-all": {"all_to_all": 2}}[method]
    is_kept = recompute in ("keep-attention", "selective") and method != "all-to-all"  # which lies around attention
    case = Case(Layout(dp_shard=2, cp=2, cp_method=method, micro_batch=4, recompute=recompute))
    for counts in ranks4.run(count_collectives, case, ("cp",)):
        for name, count in CONTEXT_COUNTS[method].items():
            assert counts[name] == SHAPE.num_layers * (count + (0 if is_kept else again.get(name, 0)))


MIXTURE = replace(SHAPE, experts=Experts(number=8, per_token=2, ffn_size=24, dense_layers=1, imbalance=1.5))


@pytest.mark.parametrize("recompute", ["none", "full", thorough("keep-attention"), "selective"])
def test_copies_of_tokens_go_to_their_experts_and_back_as_often_and_as_large_as_predicted(
    ranks4: Ranks, recompute: str
) -> None:
    """The last rank is the fullest; each copy has a score in fp32, and ranks hear in int32 how many come."""
    case = Case(Layout(dp_shard=4, ep=4, recompute=recompute), precision=FP32, model=MIXTURE)
    experts, scenario = describe(MIXTURE).experts, make_scenario(case)
    assert experts
    copies = round(copied_bytes(scenario, case.layout, experts))
    count = count_exchanges(scenario, Recompute.parse(recompute))
    assert copies == 1.5 * 2 * SEQ_LEN * SHAPE.hidden_size * 4
    again = count.again if recompute != "none" else 0
    assert (count.forward, count.backward, again) == (2, 2, 1 if recompute in ("full", "keep-attention") else 0)
    times = 2 * (SHAPE.num_layers - 1)  # microbatches and blocks with experts
    assert ranks4.run(list_exchanges, case)[3] == {
        copies: times * (count.forward + count.backward + again),
        copies // SHAPE.hidden_size: times * (2 + again),
        8 * 4: times * (1 + again),
    }


def test_a_ring_hands_on_keys_and_values_to_all_others_and_their_gradients_back(ranks4: Ranks) -> None:
    case = Case(Layout(cp=4, micro_batch=8))
    for counts in ranks4.run(count_collectives, case, ("cp",)):
        assert counts["all_to_all"] == SHAPE.num_layers * 3 * 3


def test_parameters_are_sharded_over_cp_too(ranks4: Ranks) -> None:
    """4 bytes a parameter over all four ranks; RoPE's tables have a rank's own positions."""
    whole = SHAPE.num_layers * count_block_parameters(SHAPE) + 2 * count_embedding_parameters(SHAPE) + SHAPE.hidden_size
    rope_bytes = 2 * SEQ_LEN // 2 * SHAPE.head_width * 4
    for alive, _ in ranks4.run(measure_bytes, Case(Layout(dp_shard=2, cp=2), precision=FP32)):
        assert (alive.parameter, alive.gradient) == (whole + rope_bytes, whole)


@pytest.mark.parametrize(
    "layout",
    mostly_thorough(
        [
            Layout(dp_shard=4, zero=3),
            Layout(dp_shard=4),
            Layout(dp_replicate=2, dp_shard=2),
            Layout(dp_shard=2, tp=2, micro_batch=2),
            Layout(tp=4, micro_batch=4, sequence_parallel=False),
            Layout(pp=2, dp_shard=2, zero=2),
            Layout(pp=2, tp=2, micro_batch=4),
        ]
    ),
    ids=str,
)
def test_state_takes_the_bytes_of_theory(ranks4: Ranks, layout: Layout) -> None:
    """fp32: 4 bytes a parameter and gradient, 8 for both moments; norms are whole on every tp rank."""
    case = Case(layout, precision=FP32)
    rope_bytes = 2 * SEQ_LEN * SHAPE.head_width * 4
    for rank, (alive, _) in enumerate(ranks4.run(measure_bytes, case)):
        stage = rank // (4 // layout.pp)
        norms = 2 * SHAPE.hidden_size * SHAPE.num_layers // layout.pp
        split = count_block_parameters(SHAPE) * SHAPE.num_layers // layout.pp - norms
        split += count_embedding_parameters(SHAPE) * (2 // layout.pp)
        norms += SHAPE.hidden_size * (stage == layout.pp - 1)
        local = split // layout.tp // layout.dp_shard + norms // layout.dp_shard
        num_tensors = 9 * SHAPE.num_layers // layout.pp + 3 // layout.pp + (layout.pp == 2 and stage == 1)
        assert alive.parameter == 4 * local + rope_bytes
        assert alive.gradient == 4 * local
        assert alive.optimizer == 8 * local + 4 * num_tensors  # each tensor's step counter


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_zero_stage_never_holds_what_it_shards(ranks4: Ranks, zero: int) -> None:
    whole = 4 * (SHAPE.num_layers * count_block_parameters(SHAPE) + 2 * count_embedding_parameters(SHAPE))
    case = Case(Layout(dp_shard=4, zero=zero), precision=FP32)  # type: ignore[arg-type]
    for _, largest in ranks4.run(measure_bytes, case):
        assert (largest.gradient < whole) is (zero > 1)
        assert (largest.gathered < whole) is (zero > 2)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=4),
        Layout(tp=4),
        Layout(dp_shard=2, tp=2),
        Layout(pp=2, tp=2),
        Layout(pp=2, dp_shard=2, schedule="interleaved-1f1b", virtual_stages=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", [thorough(SHAPE), TIED], ids=["untied", "tied"])
def test_initial_weights_are_the_same_bits_in_every_layout(ranks4: Ranks, layout: Layout, model) -> None:
    case = Case(layout, model=model, precision=FP32)
    alone = run_initial_weights(case)
    found: dict[str, np.ndarray] = {}
    for weights in ranks4.run(initial_weights, case):
        for name, value in weights.items():
            np.testing.assert_array_equal(value, alone[name], err_msg=name)
        found |= weights
    assert found.keys() == alone.keys()


def run_initial_weights(case: Case) -> dict[str, np.ndarray]:
    model = Llama(case.model, case.kernels, SEQ_LEN)
    initialize([model], case.model, SEED, "cpu")
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("dropped", "case"),
    [
        ("gradients over dp", Case(Layout(dp_shard=4))),
        ("activations over tp", Case(Layout(tp=4, micro_batch=4, sequence_parallel=False))),
        ("loss over tp", Case(Layout(dp_shard=2, tp=2, micro_batch=4))),
        ("tied gradients over pp", Case(Layout(pp=4), model=TIED)),
        ("keys and values over cp", Case(Layout(cp=4, micro_batch=4))),
    ],
)
def test_the_harness_sees_a_missing_collective(ranks4: Ranks, dropped: str, case: Case) -> None:
    outcomes = ranks4.run(run_sabotaged, case, dropped)
    size, _ = largest_difference(merge(outcomes), run_reference(case))
    assert size > 1e-3
    assert math.isfinite(size)
