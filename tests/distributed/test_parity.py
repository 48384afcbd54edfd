"""Every layout computes what one process computes: loss, gradient norm, every gradient, and the updated parameters."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from tempfile import gettempdir

import pytest
from drawn import legal_cases
from hypothesis import HealthCheck, given, settings
from outside import V_GPIPE, registered
from parity import (
    BALANCED,
    BF16,
    FP16,
    FP32,
    LEAN,
    QWEN2,
    QWEN3,
    SHAPE,
    SMOOTH,
    TIED,
    Case,
    evaluate_after,
    evaluate_around_steps,
    largest_difference,
    merge,
    offload_without_a_bit,
    relative_difference,
    run_frozen,
    run_in_a_v,
    run_layout,
    run_over_symmetric_memory,
    run_reference,
    run_torch_muon,
    skip_between_steps,
    train_with_overflows,
)
from plugged import plugged_in
from ranks import Ranks
from thorough import mostly_thorough, thorough

from dtlayout.schedules.schedules import SCHEDULES
from dtlayout.spec.context_parallel import CONTEXT_METHODS
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import SGD, Optimizer
from dtlayout.spec.precision import Precision

AXES = {
    "dp4": Layout(dp_shard=4),
    "hsdp": Layout(dp_replicate=2, dp_shard=2),
    "replicate4": Layout(dp_replicate=4),
    "tp4 with sp": Layout(tp=4, micro_batch=4),
    "tp4 without sp": Layout(tp=4, micro_batch=4, sequence_parallel=False),
    "pp4": Layout(pp=4),
    "pp4 gpipe": Layout(pp=4, schedule="gpipe", micro_batch=2),
    "pp2 interleaved": Layout(pp=2, dp_shard=2, schedule="interleaved-1f1b", virtual_stages=2),
    "pp2 interleaved thrice": Layout(pp=2, tp=2, micro_batch=2, schedule="interleaved-1f1b", virtual_stages=3),
    "pp2 tp2": Layout(pp=2, tp=2, micro_batch=4),
    "pp2 tp2 without sp": Layout(pp=2, tp=2, micro_batch=4, sequence_parallel=False),
    "pp2 dp2": Layout(pp=2, dp_shard=2),
    "dp2 tp2": Layout(dp_shard=2, tp=2, micro_batch=2),
    "replicate2 tp2": Layout(dp_replicate=2, tp=2, micro_batch=2),
    "one microbatch": Layout(dp_shard=4, micro_batch=2),
    "uneven layers, ends alone": Layout(pp=4, stage_layers=(0, 4, 2, 0)),
    "zero 2": Layout(dp_shard=4, zero=2),
    "zero 3": Layout(dp_shard=4, zero=3),
    "zero 2 hsdp": Layout(dp_replicate=2, dp_shard=2, zero=2),
    "zero 3 hsdp": Layout(dp_replicate=2, dp_shard=2, zero=3),
    "zero 2 pp2": Layout(pp=2, dp_shard=2, zero=2),
    "zero 3 pp2": Layout(pp=2, dp_shard=2, zero=3),
    "zero 3 pp2 gpipe": Layout(pp=2, dp_shard=2, zero=3, schedule="gpipe"),
    "zero 2 interleaved": Layout(pp=2, dp_shard=2, zero=2, schedule="interleaved-1f1b", virtual_stages=3),
    "zero 3 tp2": Layout(dp_shard=2, tp=2, micro_batch=2, zero=3),
    "full recompute": Layout(dp_shard=2, tp=2, micro_batch=2, recompute="full"),
    "full recompute zero 3": Layout(pp=2, dp_shard=2, zero=3, recompute="full"),
    "selective recompute": Layout(dp_shard=2, tp=2, micro_batch=2, recompute="selective"),
    "selective recompute pp2": Layout(pp=2, tp=2, micro_batch=4, sequence_parallel=False, recompute="selective"),
    "tp4 overlapped": Layout(tp=4, micro_batch=4, tp_overlap=True),
    "pp2 tp2 overlapped": Layout(pp=2, tp=2, micro_batch=4, tp_overlap=True, recompute="selective"),
    "zero 3 tp2 overlapped": Layout(dp_shard=2, tp=2, micro_batch=1, zero=3, tp_overlap=True, recompute="full"),
    "cp4": Layout(cp=4),
    "cp4 gathered": Layout(cp=4, cp_method="gather", zero=3),
    "cp4 by heads": Layout(cp=4, cp_method="all-to-all", micro_batch=2),
    "dp2 cp2": Layout(dp_shard=2, cp=2, zero=2, recompute="full"),
    "pp2 cp2 gathered": Layout(pp=2, cp=2, cp_method="gather", recompute="selective"),
    "cp2 tp2 by heads": Layout(cp=2, cp_method="all-to-all", tp=2, micro_batch=2, recompute="keep-attention"),
    "replicate2 cp2": Layout(dp_replicate=2, cp=2, micro_batch=2),
    "cp2 tp2 without sp": Layout(cp=2, tp=2, sequence_parallel=False),
    "every second recomputed": Layout(pp=2, tp=2, micro_batch=4, recompute="every-2"),
    "offloaded": Layout(dp_shard=4, offload="activations"),
    "offloaded pp4": Layout(pp=4, offload="activations", recompute="full"),
    "offloaded pp2 tp2": Layout(pp=2, tp=2, micro_batch=2, offload="activations", recompute="selective"),
    "offloaded interleaved": Layout(
        pp=2, dp_shard=2, schedule="interleaved-1f1b", virtual_stages=3, offload="activations", zero=3
    ),
    "offloaded gpipe cp2": Layout(pp=2, cp=2, schedule="gpipe", offload="activations", recompute="every-2"),
    "offloaded state": Layout(dp_shard=2, tp=2, micro_batch=2, offload="optimizer"),
    "offloaded state zero 2 hsdp": Layout(dp_replicate=2, dp_shard=2, zero=2, offload="optimizer"),
    "offloaded both": Layout(pp=2, dp_shard=2, zero=3, offload="both"),
    "offloaded to disk": Layout(dp_shard=2, tp=2, zero=3, micro_batch=2, offload="disk", offload_folder=gettempdir()),
    "offloaded to disk pp2 hsdp": Layout(pp=2, dp_replicate=2, zero=2, offload="disk", offload_folder=gettempdir()),
    "offloaded both of one shard": Layout(pp=2, tp=2, micro_batch=2, offload="both", recompute="full"),
}

SCHEDULED = [
    Layout(pp=4, schedule="zb-h1"),
    Layout(pp=2, schedule="zb-h1", dp_shard=2, zero=3),
    Layout(pp=2, schedule="zb-h1", dp_shard=2, zero=2, micro_batch=2, recompute="full"),
    Layout(pp=2, schedule="zb-h1", tp=2, micro_batch=2, zero=3, recompute="selective"),
    Layout(pp=2, schedule="zb-h1", tp=2, micro_batch=2, sequence_parallel=False, recompute="every-2"),
    Layout(pp=2, schedule="zb-h1", cp=2, zero=3),
    Layout(pp=4, schedule="zb-h1", stage_layers=(0, 5, 2, 1)),
    Layout(pp=4, schedule="looped-bfs", virtual_stages=2),
    Layout(pp=2, schedule="looped-bfs", virtual_stages=4, dp_shard=2, zero=3, recompute="full"),
    Layout(pp=4, schedule="interleaved-zb", virtual_stages=2),
    Layout(pp=2, schedule="interleaved-zb", virtual_stages=3, dp_replicate=2, zero=2),
    Layout(pp=2, schedule="interleaved-zb", virtual_stages=2, dp_shard=2, zero=3, recompute="full"),
    *(
        layout
        for name in ("zb-v", "v-half", "v-min", "dualpipe-v")
        for layout in (
            Layout(pp=4, schedule=name, virtual_stages=2),
            Layout(pp=2, schedule=name, virtual_stages=2, dp_shard=2, zero=3, stage_layers=(1, 3, 2, 2)),
        )
    ),
    *(
        Layout(pp=2, schedule=name, virtual_stages=2, tp=2, micro_batch=1, recompute="full")
        for name in ("v-half", "dualpipe-v")
    ),
    Layout(pp=2, schedule="zb-v", virtual_stages=2, dp_replicate=2, zero=1, recompute="keep-attention"),
    Layout(pp=2, schedule="dualpipe-v", virtual_stages=2, cp=2, cp_method="all-to-all", zero=2),
]
"""Schedules that split backwards, that lie in a V, or that go through a stage with all microbatches."""
USUALLY_SCHEDULED = (0, 1, 3, 6, 8, 9, 11, 12, 15, 16, 19, 20, 23)
"""Each schedule, and splitting beside each axis and each ZeRO stage."""

TIED_LAYOUTS = {
    "dp4": Layout(dp_shard=4),
    "dp2 tp2": Layout(dp_shard=2, tp=2, micro_batch=2),
    "tp4 without sp": Layout(tp=4, micro_batch=4, sequence_parallel=False),
    "pp4": Layout(pp=4),
    "pp2 tp2": Layout(pp=2, tp=2, micro_batch=4),
    "pp2 dp2 zero 3": Layout(pp=2, dp_shard=2, zero=3),
    "zero 3": Layout(dp_shard=4, zero=3),
    "interleaved hsdp": Layout(pp=2, dp_replicate=2, schedule="interleaved-1f1b", virtual_stages=2),
    "offloaded pp2 tp2": Layout(pp=2, tp=2, micro_batch=4, offload="both"),
    "offloaded zero 3": Layout(dp_shard=4, zero=3, offload="both"),
}


STOOD_FOR = {
    "dp4": "shards of unequal length",
    "dp2 tp2": "shards of unequal length",
    "zero 3": "shards of unequal length",
    "pp2 tp2": "two steps of every optimizer",
    "pp2 dp2": "moments in bf16",
    "zero 3 hsdp": "moments in bf16",
    "offloaded both": "moments in bf16",
    "zero 2": "zero 2 hsdp",
    "zero 3 pp2": "full recompute zero 3",
    "zero 3 tp2": "zero 3 tp2 overlapped",
    "pp2 tp2 without sp": "selective recompute pp2",
    "pp2 interleaved": "zero 2 interleaved",
    "offloaded pp2 tp2": "offloaded both of one shard",
    "offloaded state": "offloaded both of one shard",
    "offloaded": "offload changes no bit",
    "offloaded state zero 2 hsdp": "offload changes no bit",
    "offloaded to disk": "offload changes no bit",
    "full recompute": "zero 3 tp2 overlapped",
    "replicate4": "matrices by torch's Muon",
    "tp4 with sp": "other families",
}
"""Layout → what always runs beside it and is exact as well: another test of the same layout, or a layout that has its
axes and more."""

VALIDATED = (
    "hsdp", "tp4 without sp", "pp4 gpipe", "pp2 interleaved thrice", "uneven layers, ends alone", "zero 2 pp2",
    "zero 3 hsdp", "zero 3 pp2", "full recompute zero 3", "selective recompute pp2", "zero 3 tp2 overlapped", "cp4",
    "pp2 cp2 gathered", "cp2 tp2 by heads", "offloaded both",
)  # fmt: skip
"""Each axis, ZeRO stage and kind of schedule; a validation runs the forwards of training."""

FAMILY_LAYOUTS = {
    "dp4": Layout(dp_shard=4, zero=3),
    "tp4 with sp": Layout(tp=4, micro_batch=4),
    "tp2 without sp": Layout(dp_shard=2, tp=2, micro_batch=2, sequence_parallel=False),
    "pp2 tp2 recomputed": Layout(pp=2, tp=2, micro_batch=2, recompute="selective"),
    "tp2 overlapped": Layout(dp_shard=2, tp=2, micro_batch=2, tp_overlap=True),
    "interleaved hsdp": Layout(pp=2, dp_replicate=2, schedule="interleaved-1f1b", virtual_stages=2),
}


def difference(ranks: Ranks, case: Case) -> tuple[float, str]:
    return largest_difference(merge(ranks.run(run_layout, case)), run_reference(case))


@pytest.mark.parametrize("name", mostly_thorough(AXES, lambda _, name: name not in STOOD_FOR))
def test_every_axis_is_exact_in_float64(ranks4: Ranks, name: str) -> None:
    size, whose = difference(ranks4, Case(AXES[name]))
    assert size <= 1e-10, whose


@pytest.mark.parametrize(
    ("name", "documents"),
    mostly_thorough(
        [
            *((name, False) for name in AXES if name.startswith("offloaded")),
            *(("offloaded", True), ("offloaded both", True)),
        ]
    ),
)
def test_offload_changes_no_bit(ranks4: Ranks, name: str, documents: bool) -> None:
    """Activations leave every rank that has more blocks than the one whose backward is what it does next."""
    case = Case(AXES[name], precision=BF16, documents=documents)
    sent = ranks4.run(offload_without_a_bit, case)
    has_one_block = case.layout.pp == 4
    assert [bool(each) for each in sent] == [
        case.layout.offloads_activations and not (has_one_block and rank == 3) for rank in range(4)
    ]


@pytest.mark.parametrize("name", ["pp2 tp2", thorough("zero 3 hsdp")])
@pytest.mark.parametrize("optimizer", [SMOOTH, SGD(momentum=0.0), SGD(weight_decay=0.1)], ids=str)
def test_two_steps_of_every_optimizer_are_exact_in_float64(ranks4: Ranks, name: str, optimizer: Optimizer) -> None:
    size, whose = difference(ranks4, Case(AXES[name], optimizer=optimizer, num_steps=2))
    assert size <= 1e-10, whose


@pytest.mark.parametrize("name", ["pp2 dp2", "zero 3 hsdp", "offloaded both"])
def test_moments_in_bf16_are_those_of_one_process_that_rounds_them(ranks4: Ranks, name: str) -> None:
    """Three steps, of which the last two read what was rounded."""
    size, whose = difference(ranks4, Case(AXES[name], optimizer=LEAN, num_steps=3))
    assert size <= 1e-10, whose


@pytest.mark.parametrize("name", ["pp2 tp2", "zero 3 hsdp", "offloaded both", "offloaded to disk"])
@pytest.mark.parametrize("optimizer", [LEAN, thorough(SMOOTH), thorough(SGD(weight_decay=0.1))], ids=str)
def test_a_loss_that_is_not_finite_changes_no_bit_on_any_rank(ranks4: Ranks, name: str, optimizer: Optimizer) -> None:
    assert ranks4.run(skip_between_steps, Case(AXES[name], optimizer=optimizer)) == [True] * 4


def test_gradients_that_overflow_change_no_bit_on_any_rank(ranks4: Ranks) -> None:
    case = Case(AXES["pp2 tp2"], precision=FP16, loss_scale=2.0**12)
    assert ranks4.run(skip_between_steps, case) == [True] * 4


@pytest.mark.parametrize(
    "case",
    [
        Case(AXES["zero 3 pp2"], model=TIED, num_steps=2, loss_scale=2.0**20),
        Case(Layout(dp_shard=2, tp=2, ep=2), model=BALANCED, num_steps=2, loss_scale=2.0**20),
    ],
    ids=["pp2", "routers' losses"],
)
def test_a_scaled_loss_changes_nothing_in_float64(ranks4: Ranks, case: Case) -> None:
    """Of one process that does not scale: loss, norm, every gradient and the weights after two updates."""
    outcome = merge(ranks4.run(run_layout, case))
    size, whose = largest_difference(outcome, run_reference(replace(case, loss_scale=None)))
    assert size <= 1e-10, whose


@pytest.mark.parametrize("name", [thorough("pp2 tp2"), "zero 3"])
def test_where_scales_overflow_again_and_again_the_loss_is_that_of_fp32(ranks4: Ranks, name: str) -> None:
    case = Case(AXES[name], model=replace(SHAPE, num_layers=2), precision=FP16, num_steps=8)
    (loss, scales), *others = ranks4.run(train_with_overflows, case)
    assert all(each == (loss, scales) for each in others), "all ranks have one scale"
    ratios = [after / before for before, after in pairwise(scales)]
    assert set(ratios) == {0.5, 1.0, 2.0} and ratios[0] == 0.5
    assert 0.5 in ratios[ratios.index(2.0) :], "it has grown until it overflowed again"
    exact = ranks4.run(evaluate_after, replace(case, precision=FP32))[0]
    assert loss == pytest.approx(exact, rel=1e-2)


def test_interleaving_over_four_ranks_is_exact_in_float64(ranks4: Ranks) -> None:
    layout = Layout(pp=4, schedule="interleaved-1f1b", virtual_stages=2)
    size, whose = difference(ranks4, Case(layout, model=replace(SHAPE, num_layers=8)))
    assert size <= 1e-10, whose


@pytest.mark.parametrize(
    "case",
    mostly_thorough(
        [
            *(Case(AXES[name]) for name in VALIDATED),
            Case(AXES["tp4 with sp"], documents=True),
            Case(AXES["pp4"], documents=True),
            *(
                Case(TIED_LAYOUTS[name], model=TIED)
                for name in ("pp2 dp2 zero 3", "interleaved hsdp", "offloaded zero 3")
            ),
        ]
    ),
    ids=lambda case: f"{case.layout}{' documents' * case.documents}{' tied' * case.model.tied_embeddings}",
)
def test_validation_has_the_loss_of_training_and_leaves_no_trace_in_it(ranks4: Ranks, case: Case) -> None:
    wanted = run_reference(replace(case, num_steps=2)).loss
    for before, first, after, second in ranks4.run(evaluate_around_steps, case):
        assert (before, after) == pytest.approx((first, second), rel=1e-12)
        assert second == pytest.approx(wanted, rel=1e-10)
        assert after < before


@pytest.mark.parametrize("name", ["tp4 overlapped", thorough("pp2 tp2 overlapped"), "zero 3 tp2 overlapped"])
def test_overlap_over_symmetric_memory_is_exact_in_float64(ranks4: Ranks, name: str) -> None:
    case = Case(AXES[name], model=QWEN2)
    size, whose = largest_difference(merge(ranks4.run(run_over_symmetric_memory, case)), run_reference(case))
    assert size <= 1e-10, whose


@pytest.mark.parametrize("degrees", [{"pp": 4}, {"pp": 2, "dp_shard": 2, "zero": 3}], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_stages_in_a_v_are_exact_in_float64(ranks4: Ranks, degrees: dict[str, int], tied: bool) -> None:
    """Where it turns nothing is sent, and both copies of a tied weight lie on one rank."""
    with registered(V_GPIPE):
        case = Case(
            Layout(schedule="v-gpipe", virtual_stages=2, **degrees),
            model=replace(TIED, num_layers=8, tied_embeddings=tied),
        )
    size, whose = largest_difference(merge(ranks4.run(run_in_a_v, case)), run_reference(case))
    assert size <= 1e-10, whose


@pytest.mark.parametrize(
    "number", mostly_thorough(range(len(SCHEDULED)), lambda i, _: i in USUALLY_SCHEDULED), ids=map(str, SCHEDULED)
)
def test_every_schedule_is_exact_in_float64(ranks4: Ranks, number: int) -> None:
    """Two steps, so that nothing is left of the first; every second layout with tied embeddings and biases."""
    case = Case(SCHEDULED[number], model=(QWEN3, QWEN2)[number % 2], num_steps=2)
    size, whose = difference(ranks4, case)
    assert size <= 1e-10, whose


@pytest.mark.parametrize("layout", [Layout(dp_shard=4), Layout(dp_shard=4, zero=3), Layout(dp_shard=2, tp=2)], ids=str)
@pytest.mark.parametrize("tied", [False, thorough(True)])
def test_shards_of_unequal_length_are_exact_in_float64(ranks4: Ranks, layout: Layout, tied: bool) -> None:
    model = replace(SHAPE, vocab_size=86, ffn_size=50, tied_embeddings=tied)
    size, whose = difference(ranks4, Case(layout, model=model))
    assert size <= 1e-10, whose


@pytest.mark.parametrize("name", mostly_thorough(TIED_LAYOUTS, lambda i, _: i % 2 > 0))
def test_tied_embeddings_are_exact_in_float64(ranks4: Ranks, name: str) -> None:
    size, whose = difference(ranks4, Case(TIED_LAYOUTS[name], model=TIED))
    assert size <= 1e-10, whose


@pytest.mark.parametrize(
    ("name", "model"),
    mostly_thorough(product(FAMILY_LAYOUTS, (QWEN2, QWEN3)), lambda i, _: i % 4 in (0, 3)),
    ids=lambda each: each if isinstance(each, str) else each.family,
)
def test_other_families_are_exact_in_float64(ranks4: Ranks, name: str, model: ModelShape) -> None:
    size, whose = difference(ranks4, Case(FAMILY_LAYOUTS[name], model=model))
    assert size <= 1e-10, whose


FROZEN_LAYOUTS = {
    "zero 3 hsdp": Case(AXES["zero 3 hsdp"]),
    "tp2 overlapped": Case(AXES["pp2 tp2 overlapped"]),
    "a first stage of which nothing trains": Case(AXES["uneven layers, ends alone"]),
    "split backwards": Case(Layout(pp=2, schedule="zb-h1", tp=2, micro_batch=2, zero=3, recompute="selective")),
    "tied ends on one rank": Case(Layout(pp=2, dp_shard=2, schedule="zb-v", virtual_stages=2, zero=2), model=TIED),
    "tied ends on two": Case(TIED_LAYOUTS["offloaded pp2 tp2"], model=TIED),
    "linear loss": Case(AXES["zero 3 pp2"], kernels=Kernels(loss="linear")),
}


def test_what_is_trained_beside_frozen_weights_is_exact_in_float64(ranks4: Ranks) -> None:
    with plugged_in("partly_frozen"):
        for name, case in FROZEN_LAYOUTS.items():
            case = replace(case, model=replace(case.model, family="partly-frozen"), num_steps=2)
            size, whose = largest_difference(merge(ranks4.run(run_frozen, case)), run_reference(case))
            assert size <= 1e-10, (name, whose)


@pytest.mark.parametrize("layout", [Layout(dp_replicate=4), Layout(pp=2, dp_replicate=2, schedule="zb-h1")], ids=str)
def test_matrices_by_torchs_muon_and_the_rest_by_adamw_are_exact_in_float64(ranks4: Ranks, layout: Layout) -> None:
    case = Case(layout, model=TIED, num_steps=2)
    outcome = merge(ranks4.run(run_torch_muon, case))
    with plugged_in("muon") as muon:
        reference = run_reference(replace(case, optimizer=muon.TorchMuon(rest=case.optimizer)))
    size, whose = largest_difference(outcome, reference)
    assert size <= 1e-10, whose


@pytest.mark.parametrize("name", ["dp4", thorough("hsdp"), "tp4 with sp", thorough("tp4 without sp"), "pp4", "zero 3"])
def test_one_layout_of_each_axis_is_close_in_fp32(ranks4: Ranks, name: str) -> None:
    size, whose = difference(ranks4, Case(AXES[name], precision=FP32))
    assert size <= 1e-5, whose


@pytest.mark.parametrize("kernels", [Kernels(attention="sdpa-math"), Kernels(norm="eager")], ids=str)
def test_every_kernel_is_exact_in_float64(ranks4: Ranks, kernels: Kernels) -> None:
    size, whose = difference(ranks4, Case(AXES["dp2 tp2"], kernels=kernels))
    assert size <= 1e-10, whose


@pytest.mark.parametrize(
    "name",
    [
        *("dp4", "pp2 tp2", thorough("pp2 interleaved"), "full recompute zero 3"),
        *mostly_thorough([name for name in AXES if "cp" in name]),
    ],
)
def test_documents_that_do_not_see_each_other_are_exact_in_float64(ranks4: Ranks, name: str) -> None:
    size, whose = difference(ranks4, Case(AXES[name], documents=True))
    assert size <= 1e-10, whose
    assert abs(run_reference(Case(AXES[name])).loss / run_reference(Case(AXES[name], documents=True)).loss - 1) > 1e-6


@pytest.fixture(scope="module")
def ranks3() -> Iterator[Ranks]:
    pool = Ranks(3)
    yield pool
    pool.close()


@pytest.mark.parametrize("attentions", [["sdpa-flash"], thorough(["sdpa-math", "blockwise"])], ids=str)
def test_three_ranks_share_a_sequence_exactly_in_float64(ranks3: Ranks, attentions: list[str]) -> None:
    """Six heads, of which three are of keys and values, and documents that cross the borders of what a rank has."""
    model = replace(SHAPE, hidden_size=48, num_heads=6, num_kv_heads=3, num_layers=2)
    for method, attention, documents in product(CONTEXT_METHODS, attentions, (False, True)):
        case = Case(
            Layout(cp=3, cp_method=method, micro_batch=2), model=model, seq_len=54, global_batch=4,
            kernels=Kernels(attention=attention), documents=documents,
        )  # fmt: skip
        outcome = merge(ranks3.run(run_layout, case, timeout_s=120))
        size, whose = largest_difference(outcome, run_reference(replace(case, kernels=Kernels())))
        assert size <= 1e-10, (case, whose)


@pytest.mark.parametrize(("name", "num_microbatches"), [*product(SCHEDULES, (6, 9))])
def test_every_schedule_is_exact_on_three_ranks(ranks3: Ranks, name: str, num_microbatches: int) -> None:
    """Seven blocks, which no number of stages divides, and both ends of a weight that is tied."""
    layout = Layout(pp=3, schedule=name, virtual_stages=SCHEDULES[name].least_virtual_stages)
    case = Case(layout, model=replace(QWEN2, num_layers=7), global_batch=num_microbatches)
    size, whose = difference(ranks3, case)
    assert size <= 1e-10, whose


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *product(("dp4", "tp4 overlapped", "pp2 tp2"), [BF16]),
        *(thorough((name, BF16)) for name in ("tp4 with sp", "zero 3")),
        *product(("tp4 with sp", "pp4", "zero 3"), [FP16]),
    ],
    ids=lambda each: each if isinstance(each, str) else each.compute,
)
def test_halves_err_no_more_than_those_of_one_process_do(ranks4: Ranks, name: str, precision: Precision) -> None:
    """fp16 with the same scale there and here."""
    layout, scale = AXES[name], 2.0**12 if precision == FP16 else None
    exact = run_reference(Case(layout))
    alone = run_reference(Case(layout, precision=precision, loss_scale=scale))
    spread = merge(ranks4.run(run_layout, Case(layout, precision=precision, loss_scale=scale)))
    assert abs(spread.loss / run_reference(Case(layout, precision=FP32)).loss - 1) <= 2e-2
    for parameter, gradient in exact.gradients.items():
        allowed = 2 * relative_difference(alone.gradients[parameter], gradient)
        assert relative_difference(spread.gradients[parameter], gradient) <= allowed, parameter


@pytest.mark.parametrize("num_examples", [6, thorough(64)])
def test_random_legal_layouts_are_exact_in_float64(ranks4: Ranks, num_examples: int) -> None:
    @settings(max_examples=num_examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=legal_cases([SHAPE, TIED, QWEN2, QWEN3]))
    def is_exact(case: Case) -> None:
        size, whose = difference(ranks4, case)
        assert size <= 1e-10, whose

    is_exact()


ON_EIGHT = [
    Layout(pp=2, cp=2, tp=2, micro_batch=2, schedule="interleaved-1f1b", virtual_stages=3, recompute="full"),
    Layout(pp=4, dp_shard=2, zero=3, schedule="zb-v", virtual_stages=2),
]
MORE_ON_EIGHT = [
    Layout(pp=2, dp_shard=2, tp=2, micro_batch=2),
    Layout(pp=2, dp_replicate=2, tp=2, micro_batch=2, sequence_parallel=False, zero=3),
    Layout(dp_replicate=2, dp_shard=2, cp=2, cp_method="gather", zero=3),
    Layout(pp=8, schedule="zb-h1"),
    Layout(pp=8, schedule="dualpipe-v", virtual_stages=2),
    Layout(pp=4, tp=2, micro_batch=2, schedule="interleaved-zb", virtual_stages=2, recompute="selective"),
]


@pytest.mark.parametrize("layouts", [ON_EIGHT, thorough(MORE_ON_EIGHT)], ids=["usual", "more"])
def test_all_axes_together_are_exact_on_eight_ranks(layouts: list[Layout]) -> None:
    ranks8 = Ranks(8)
    try:
        for layout in layouts:
            enough = 2 * max(2, layout.pp) * layout.dp * layout.micro_batch
            case = Case(layout, enough)
            size, whose = largest_difference(merge(ranks8.run(run_layout, case, timeout_s=120)), run_reference(case))
            assert size <= 1e-10, (layout, whose)
    finally:
        ranks8.close()
