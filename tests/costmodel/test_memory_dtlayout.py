"""Memory of our own engine in closed form: what theory says exactly, and how phases compose."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtlayout.costmodel.engine import find_engine
from dtlayout.costmodel.estimate import Estimator
from dtlayout.costmodel.fsdp2.memory import estimate_curve
from dtlayout.costmodel.fsdp2.phase import IDLE, NOTHING, MemoryKind, Phase, add, changes, fullest_of, sequence
from dtlayout.costmodel.memory import RankMemory
from dtlayout.costmodel.scenario import Scenario, cut
from dtlayout.models.counting import count_block_parameters, count_embedding_parameters, count_parameters
from dtlayout.models.presets import PRESETS
from dtlayout.schedules.schedules import find_schedule
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import Cluster, find_gpu
from dtlayout.spec.kernels import Kernels, count_loss_chunks
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import Precision

MODEL = replace(PRESETS["llama-13b"], num_layers=8)
H, NUM_TENSORS = MODEL.hidden_size, 9 * MODEL.num_layers + 3
SEQ_LEN = 2048
TABLES = 2 * SEQ_LEN * MODEL.head_width * 4
EMBEDDING = count_embedding_parameters(MODEL)
BF16_MASTERS = Precision(params="bfloat16", compute="bfloat16", reduce="bfloat16")


def estimate(
    layout: Layout,
    *,
    kernels: Kernels | None = None,
    model=MODEL,
    microbatches: int = 8,
    gpu: str = "a100-80g-sxm",
    precision: Precision | None = None,
    document_mask: bool = False,
) -> RankMemory:
    scenario = replace(
        scenario_of(layout, microbatches, gpu),
        model=model,
        precision=precision or Precision(),
        document_mask=document_mask,
    )
    return Estimator(scenario).memory(layout, kernels or Kernels())


def scenario_of(layout: Layout, microbatches: int, gpu: str = "a100-80g-sxm") -> Scenario:
    return Scenario(
        model=MODEL,
        batch=Batch(global_batch=microbatches * layout.dp * layout.micro_batch, seq_len=SEQ_LEN),
        cluster=Cluster(gpu=find_gpu(gpu), num_gpus=layout.world_size, gpus_per_node=8),
        engine=find_engine("dtlayout", gpu),
    )


def local_parameters(tp: int) -> int:
    """Of the whole model on one tp rank: matrices are split, norms are not."""
    norms = H * (2 * MODEL.num_layers + 1)
    return (count_parameters(MODEL) - norms) // tp + norms


@pytest.mark.parametrize(
    ("dp_shard", "dp_replicate", "tp"), [(1, 1, 1), (8, 1, 1), (4, 2, 1), (1, 4, 1), (8, 1, 2), (1, 1, 8)]
)
@pytest.mark.parametrize("precision", [Precision(), BF16_MASTERS], ids=["fp32 masters", "bf16 masters"])
def test_state_takes_the_bytes_of_theory(dp_shard, dp_replicate, tp, precision):
    """p·n/S masters, e·n gathered, RoPE's tables; 2·p·n/S moments with 4 bytes a tensor; r·n gradients that add up."""
    layout = Layout(dp_shard=dp_shard, dp_replicate=dp_replicate, tp=tp, micro_batch=2)
    at_the_loss = Kernels(loss="eager")  # whose logits make the peak where all of the state is there
    (rank,) = estimate(layout, precision=precision, kernels=at_the_loss)
    n, masters = local_parameters(tp), 4 if precision.params == "float32" else 2
    assert rank.parameters == masters * n / dp_shard + 2 * n + TABLES
    assert rank.optimizer == 2 * masters * n / dp_shard + 4 * NUM_TENSORS
    assert rank.gradients == pytest.approx(masters * n, rel=0.02)  # the last unit's in bf16 beside


@pytest.mark.parametrize(
    ("attention", "recompute", "gpu", "num_masks"),
    [
        ("sdpa-flash", "none", "a100-80g-sxm", [0, 0]),
        ("flash-attn", "none", "a100-80g-sxm", [0, 0]),
        ("sdpa-efficient", "none", "a100-80g-sxm", [2, 1]),
        ("sdpa-flash", "none", "cpu", [2, 1]),
        ("sdpa-cudnn", "full", "a100-80g-sxm", [1, 1]),  # fullest while the last microbatch's gradients are reduced
        ("sdpa-math", "full", "a100-80g-sxm", [1, 1]),
    ],
)
def test_documents_cost_a_mask_for_each_microbatch_in_flight_where_attention_takes_no_offsets(
    attention, recompute, gpu, num_masks
):
    layout, kernels = Layout(pp=2, micro_batch=2, recompute=recompute), Kernels(attention=attention)
    without, with_masks = (
        estimate(layout, kernels=kernels, gpu=gpu, document_mask=has_documents) for has_documents in (False, True)
    )
    more = [after.total - before.total for before, after in zip(without, with_masks, strict=True)]
    assert more == [count * 2 * SEQ_LEN**2 * 2 for count in num_masks]


def test_zero_3_holds_shards_and_the_unit_in_use():
    (rank,) = estimate(Layout(dp_shard=64, zero=3))
    n, unit = local_parameters(1), max(count_block_parameters(MODEL), EMBEDDING)
    assert rank.optimizer == pytest.approx(8 * n / 64, rel=1e-4)
    assert 4 * n / 64 <= rank.parameters - TABLES <= 4 * n / 64 + 2 * unit
    assert rank.gradients <= 4 * n / 64 + 2 * unit + 4 * unit / 64


def test_higher_zero_stages_hold_less():
    totals = [estimate(Layout(dp_shard=32, zero=zero))[0].total for zero in (1, 2, 3)]  # type: ignore[arg-type]
    assert totals == sorted(totals, reverse=True)


def block_activations(*, norm="fused", attention="sdpa-flash", gpu="a100-80g-sxm") -> float:
    """What one more block keeps."""
    kernels = Kernels(norm=norm, attention=attention)
    fewer, more = (
        estimate(Layout(dp_shard=8), kernels=kernels, gpu=gpu, model=replace(MODEL, num_layers=layers))[0].activations
        for layers in (8, 16)
    )
    return (more - fewer) / 8


def test_a_block_keeps_what_autograd_saves():
    """In bf16: two norms' inputs and outputs 8·h; q, k, v and the output 8·h; gate, up, silu(gate), product 8·f."""
    fp32_numbers = MODEL.num_heads + 2  # a token's: of each head's softmax and of both norms
    assert block_activations() == SEQ_LEN * (16 * H + 8 * MODEL.ffn_size + 4 * fp32_numbers)


def test_a_norm_as_separate_operations_keeps_exact_copies():
    """The input in fp32 instead of bf16, and its product with the scale: in bf16, or in fp32 where PyTorch does it."""
    assert block_activations(norm="eager") - block_activations() == 2 * SEQ_LEN * H * (4 - 2 + 2)
    assert block_activations(gpu="cpu") - block_activations() == 2 * SEQ_LEN * H * (4 - 2 + 4)


def test_sdpa_math_keeps_scores_and_exact_inputs_in_fp32():
    more = block_activations(attention="sdpa-math") - block_activations()
    assert more == MODEL.num_heads * SEQ_LEN * (4 * SEQ_LEN - 4) + SEQ_LEN * H * (3 * 4 - 3 * 2)


@pytest.mark.parametrize(
    ("loss", "whole", "at_once"), [("eager", 2 + 2 + 4, 0), ("chunked", 2 + 2, 4), ("linear", 0, 2 + 2 + 4)]
)
def test_the_loss_needs_logits_their_gradient_and_an_exact_softmax_of_as_many_as_it_takes_at_once(loss, whole, at_once):
    wide = replace(MODEL, vocab_size=512_000, num_layers=2)
    alone, split = (
        estimate(replace(layout, micro_batch=16), model=wide, kernels=Kernels(loss=loss))[0]
        for layout in (Layout(dp_shard=8), Layout(tp=2, dp_shard=4))
    )
    tokens = 16 * SEQ_LEN
    logits = tokens * wide.vocab_size
    early = 2 * tokens * H if loss == "linear" else 0  # the gradients of hidden states and of the weight
    weight = 2 * wide.vocab_size * H if loss == "linear" else 0
    per_logit = whole + at_once / count_loss_chunks(tokens)
    assert alone.logits == per_logit * logits + early + weight
    assert split.logits == per_logit * logits / 2 + early + weight / 2


@pytest.mark.parametrize("layout", [Layout(tp=2, dp_shard=4), Layout(pp=4, dp_shard=2)], ids=str)
def test_recomputation_holds_less_the_more_it_recomputes(layout):
    peaks = [
        max(rank.total for rank in estimate(replace(layout, recompute=recompute)))
        for recompute in ("none", "selective", "full")
    ]
    assert peaks == sorted(peaks, reverse=True)
    every_second = max(rank.total for rank in estimate(replace(layout, recompute="every-2")))
    assert peaks[2] < every_second < peaks[0]


def test_the_first_rank_of_1f1b_holds_a_microbatch_for_each_rank_after_it():
    ranks = estimate(Layout(pp=4, dp_shard=2), model=replace(MODEL, num_layers=16))
    assert ranks[1].activations - ranks[2].activations == 4 * block_activations()


def test_a_tied_weight_on_one_rank_counts_once():
    layout = Layout(dp_shard=8, micro_batch=4)  # both are fullest where all is gathered
    tied = estimate(layout, model=replace(MODEL, tied_embeddings=True))[0]
    untied = estimate(layout)[0]
    assert untied.parameters - tied.parameters == EMBEDDING * (4 / 8 + 2)


def test_long_steps_hold_what_short_ones_do():
    """Of a long step only a part is played."""
    for layout in (
        Layout(pp=4, dp_shard=2),
        Layout(pp=4, dp_shard=2, schedule="interleaved-1f1b", virtual_stages=2),
        Layout(dp_shard=8),
    ):
        short, long = (estimate(layout, microbatches=m) for m in (12, 64))
        assert [replace(rank, overhead=0.0) for rank in short] == [replace(rank, overhead=0.0) for rank in long]


# Phases

parts = st.sampled_from(list(MemoryKind))
steps = st.lists(st.tuples(parts, st.integers(-50, 50)), max_size=6)


@given(steps, steps)
def test_phases_compose_as_their_changes_do(first, second):
    assert_alike(sequence([changes(*first), changes(*second)]), changes(*first, *second))


@given(steps, st.integers(0, 5))
def test_a_repeated_phase_is_its_changes_repeated(some, count):
    assert_alike(changes(*some).times(count), changes(*some * count))


@given(st.lists(steps, min_size=1, max_size=4))
def test_the_fullest_of_phases_is_that_of_their_sequence(lists):
    phases = [changes(*some) for some in lists]
    start = (10.0,) * len(MemoryKind)
    assert sum(fullest_of(start, phases, range(len(phases)))) == sum(add(start, sequence(phases).fullest))


def test_nothing_happens_in_an_idle_phase():
    assert IDLE == changes() == Phase(NOTHING, NOTHING)


def assert_alike(a: Phase, b: Phase) -> None:
    """The fullest moment may be another one of the same total."""
    assert (sum(a.fullest), a.left) == (sum(b.fullest), b.left)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=4, zero=3),
        Layout(pp=4, dp_shard=2, schedule="gpipe", recompute="full"),
        Layout(pp=4, tp=2),
        Layout(pp=2, dp_shard=4, zero=2, schedule="interleaved-1f1b", virtual_stages=2),
    ],
    ids=str,
)
def test_the_curve_of_a_step_has_the_peak_of_its_rank(layout):
    scenario = scenario_of(layout, microbatches=8)
    stages = cut(scenario, layout)
    for rank, found in enumerate(Estimator(scenario).memory(layout, Kernels())):
        order = find_schedule(layout.schedule).order(layout.placement, rank, 8)
        curve = list(estimate_curve(scenario, layout, Kernels(), stages, rank, 8))
        assert [action for action, _, _ in curve] == [None, *order]
        assert max(fullest for _, fullest, _ in curve) == pytest.approx(found.total)
        assert all(left <= fullest for _, fullest, left in curve)
