"""Muon in every layout computes what it computes on one process that has whole matrices."""

from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch
from memory_ranks import predict
from muon_ranks import (
    describe_joint_group,
    list_sent,
    measure_small_buckets,
    run_by_shards,
    run_in_small_buckets,
    small_buckets,
    sum_over_joint_group,
)
from parity import (
    BF16,
    FP32,
    MIXTURE,
    SHAPE,
    SMOOTH,
    TIED,
    Case,
    largest_difference,
    merge,
    run_layout,
    run_reference,
    skip_between_steps,
)
from ranks import Ranks
from rehearsal import rehearse
from resuming import NUM_STEPS, resume
from thorough import mostly_thorough, thorough

from dtlayout.models.families import describe
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import Experts, ModelShape
from dtlayout.spec.optimizers import Muon

MUON = Muon(lr=2e-2, rest=SMOOTH)
ORIGINAL = Muon(lr=2e-2, adjust="original", nesterov=False, momentum=0.8, steps=3, weight_decay=0.5, rest=SMOOTH)
MODEL = replace(SHAPE, num_layers=4)
UNEQUAL = replace(MODEL, ffn_size=50, vocab_size=86)
EXPERTS = replace(MIXTURE, num_layers=4)
FEW = replace(MODEL, experts=Experts(number=2, per_token=1, ffn_size=22, normalized=False))
"""Two experts over four ranks: one stack by rows of its matrices, whose rows four divides, and two by experts."""
CASES = {
    "dp in unequal shards": Case(Layout(dp_shard=4), model=UNEQUAL),
    "zero 2 and tp with sp": Case(Layout(dp_shard=2, tp=2, zero=2, micro_batch=2), model=UNEQUAL),
    "pp and tp without sp": Case(Layout(pp=2, tp=2, sequence_parallel=False), model=replace(TIED, num_layers=4)),
    "zero bubble": Case(Layout(pp=2, dp_shard=2, zero=3, schedule="zb-h1"), model=MODEL, optimizer=ORIGINAL),
    "hsdp": Case(Layout(dp_replicate=2, dp_shard=2, zero=3, recompute="full"), model=MODEL),
    "cp": Case(Layout(dp_shard=2, cp=2, zero=3), model=MODEL),
    "tp and ep": Case(Layout(dp_shard=2, tp=2, ep=4), model=EXPERTS),
    "experts by rows": Case(Layout(dp_shard=4, zero=3), model=FEW),
    "tp alone": Case(Layout(tp=4, micro_batch=2), model=MODEL, optimizer=ORIGINAL),
    "copies alone": Case(Layout(dp_replicate=4), model=MODEL),
    "copies, tp and cp": Case(Layout(dp_replicate=2, tp=2, zero=2), model=UNEQUAL),
    "zero bubble in a V": Case(Layout(pp=2, tp=2, schedule="zb-v", virtual_stages=2), model=MODEL),
    "interleaved": Case(Layout(pp=2, cp=2, schedule="interleaved-1f1b", virtual_stages=2), model=MODEL),
    "experts whole": Case(Layout(dp_shard=4, zero=2), model=EXPERTS),
    "experts over tp": Case(Layout(dp_shard=2, tp=2, zero=3), model=EXPERTS, optimizer=ORIGINAL),
    "experts and pp": Case(Layout(pp=2, dp_shard=2, ep=2, schedule="zb-h1"), model=EXPERTS),
    "copies of experts": Case(Layout(dp_replicate=2, dp_shard=2, ep=2, zero=3), model=EXPERTS),
    "activations on the host": Case(Layout(dp_shard=4, offload="activations"), model=MODEL),
}  # fmt: skip


def with_muon(case: Case, **changes: object) -> Case:
    settings = MUON if case.optimizer is SMOOTH else case.optimizer
    return replace(case, optimizer=settings, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", mostly_thorough(CASES, lambda i, _: i < 8))
def test_five_updates_are_exact_in_float64(ranks4: Ranks, name: str) -> None:
    """Every second case has a matrix for each rank in a bucket, the others have all in one."""
    case = with_muon(CASES[name], num_steps=5)
    run = run_in_small_buckets if [*CASES].index(name) % 2 else run_layout
    size, whose = largest_difference(merge(ranks4.run(run, case, timeout_s=120)), run_reference(case))
    assert size <= 1e-10, whose


ROWS_OF_FEW = replace(FEW, experts=Experts(number=4, per_token=2, ffn_size=24, normalized=False))
ON_EIGHT = [
    Case(Layout(dp_replicate=2, dp_shard=2, tp=2, zero=3), model=UNEQUAL),
    Case(Layout(dp_shard=2, cp=2, tp=2, ep=8, zero=2), model=EXPERTS),
    Case(Layout(dp_shard=8, ep=2, zero=3), model=ROWS_OF_FEW),
    Case(Layout(pp=2, dp_shard=2, tp=2, schedule="zb-h1"), model=MODEL),
]


@pytest.mark.thorough
def test_three_axes_together_are_exact_on_eight_ranks() -> None:
    """The third one shards the two experts of each ep rank over four ranks, by rows of their matrices."""
    ranks8 = Ranks(8)
    try:
        for case in (with_muon(case, num_steps=3) for case in ON_EIGHT):
            outcome = merge(ranks8.run(run_in_small_buckets, case, timeout_s=200))
            size, whose = largest_difference(outcome, run_reference(case))
            assert size <= 1e-10, (case.layout, whose)
    finally:
        ranks8.close()


@pytest.mark.parametrize("case", [Case(Layout(dp_shard=4), model=MODEL), thorough(CASES["pp and tp without sp"])])
def test_the_harness_sees_shards_that_are_orthogonal_for_themselves(ranks4: Ranks, case: Case) -> None:
    case = with_muon(case)
    size, whose = largest_difference(merge(ranks4.run(run_by_shards, case)), run_reference(case))
    assert size > 1e-3 and "parameters of " in whose


@pytest.mark.parametrize("name", ["zero 2 and tp with sp", thorough("experts by rows"), thorough("hsdp")])
def test_a_step_that_is_not_finite_changes_no_bit_and_none_of_the_next(ranks4: Ranks, name: str) -> None:
    assert ranks4.run(skip_between_steps, with_muon(CASES[name], precision=FP32)) == [True] * 4


PAIRS = [
    (Layout(pp=2, tp=2, schedule="zb-h1"), Layout(dp_shard=4, zero=3), TIED),
    (Layout(dp_shard=4, zero=3), Layout(dp_shard=2, tp=2, ep=4), MIXTURE),
    thorough((Layout(dp_shard=2, tp=2, ep=2), Layout(pp=2, dp_shard=2, ep=2), MIXTURE)),
    thorough((Layout(dp_replicate=2, cp=2), Layout(pp=2, tp=2), TIED)),
]


@pytest.mark.parametrize(("saved_as", "resumed_as", "model"), PAIRS)
def test_a_run_goes_on_under_another_layout_as_if_nothing_had_been_saved(
    ranks4: Ranks, tmp_path, saved_as: Layout, resumed_as: Layout, model: ModelShape
) -> None:
    model = replace(model, num_layers=4)
    saved, resumed = (Case(layout, 8, model=model, optimizer=MUON) for layout in (saved_as, resumed_as))
    outcome = merge(ranks4.run(resume, saved, resumed, tmp_path))
    reference = run_reference(Case(Layout(), 8, model=model, optimizer=MUON, num_steps=NUM_STEPS))
    size, whose = largest_difference(outcome, replace(reference, gradients={}))
    assert size <= 1e-9, whose


@pytest.mark.parametrize("layout", [Layout(dp_shard=2, tp=2, micro_batch=2), thorough(Layout(tp=4, micro_batch=2))])
def test_an_update_sends_each_matrix_once_in_bf16_and_back(ranks4: Ranks, layout: Layout) -> None:
    """A rank sends its fourth of the momentum, and what it has iterated; what is its own stays."""
    of_ranks = ranks4.run(list_sent, Case(layout, model=MODEL, precision=FP32, optimizer=MUON))
    weights = [each for each in describe(MODEL).block_weights if each.role == "matrix"]
    whole = MODEL.num_layers * sum(each.numel for each in weights)
    for sent, events in of_ranks:
        there, back = sent
        assert {there.dtype, back.dtype} == {torch.bfloat16}
        assert sum(there.to_ranks) == sum(back.from_ranks) == whole / 4
        assert there.from_ranks == back.to_ranks and there.to_ranks == back.from_ranks
        sizes = [2 * max(sum(there.to_ranks), sum(there.from_ranks))] * 2
        assert [(event.name, event.ranks, event.nbytes) for event in events] == [
            ("all_to_all", (0, 1, 2, 3), size) for size in sizes
        ]
    iterated = [sum(sent[0].from_ranks) for sent, _ in of_ranks]
    assert sum(iterated) == whole
    largest = max(prod(each.shape) for each in weights)
    assert max(iterated) - min(iterated) <= largest


def test_whole_experts_are_not_sent(ranks4: Ranks) -> None:
    model = replace(MODEL, experts=Experts(number=8, per_token=2, ffn_size=24))
    case = Case(Layout(dp_shard=4, ep=2), model=model, precision=FP32, optimizer=MUON)
    everywhere = [each for each in describe(model).block_weights if each.role == "matrix"]
    for sent, _ in ranks4.run(list_sent, case):
        assert len(sent) == 2 and sum(sent[0].to_ranks) == MODEL.num_layers * sum(each.numel for each in everywhere) / 4


def test_ranks_of_two_axes_have_one_group_with_the_time_limit_of_the_mesh(ranks4: Ranks) -> None:
    limit_s = 1795.0  # other tests use the groups
    found = ranks4.run(describe_joint_group, Layout(dp_shard=2, tp=2), limit_s)
    assert found == [([0, 1, 2, 3], limit_s, True)] * 4


def test_ranks_of_two_axes_find_each_other_though_one_is_in_more_groups(ranks4: Ranks) -> None:
    """As after a timeline, whose group has some ranks alone. No other test has a joint group of these pairs."""
    assert ranks4.run(sum_over_joint_group, Layout(pp=2, tp=2), timeout_s=60) == [2.0] * 4


DEEP = replace(SHAPE, hidden_size=128, ffn_size=192, num_layers=12)
PEAKS = {
    "tp": Case(Layout(dp_shard=2, tp=2, zero=3), model=replace(DEEP, ffn_size=202)),
    "copies": Case(Layout(dp_replicate=4, zero=3), model=DEEP),
    "experts by rows": Case(
        Layout(dp_shard=4, zero=3), model=replace(DEEP, experts=Experts(number=2, per_token=1, ffn_size=192))
    ),
    "pp": Case(Layout(pp=2, dp_shard=2, zero=3, schedule="zb-h1"), model=DEEP),
    "whole experts": Case(
        Layout(dp_shard=4, ep=2, zero=3), model=replace(DEEP, experts=Experts(number=8, per_token=2, ffn_size=96))
    ),
}


@pytest.mark.parametrize(
    ("name", "most_elements"), mostly_thorough(product(PEAKS, (1 << 26, 1 << 15)), lambda i, _: i == 3)
)
def test_the_peak_of_an_update_is_predicted_dry_and_measured_alike(
    ranks4: Ranks, name: str, most_elements: int
) -> None:
    case = replace(PEAKS[name], precision=BF16, optimizer=MUON)
    measured = ranks4.run(measure_small_buckets, case, most_elements, timeout_s=120)[0]
    with small_buckets(most_elements):
        predicted = [rank.total for rank in predict(case)]
    assert predicted == pytest.approx(measured, rel=0.02)
    if most_elements > 1 << 20:
        firsts = [rank * 4 // case.layout.pp for rank in range(case.layout.pp)]
        dry = [report.peak_bytes for _, report in sorted(rehearse(case, firsts).items())]
        assert dry == pytest.approx(measured, rel=0.02)
