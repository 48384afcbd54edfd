"""Trainings in fp8: torchao's on one process, and the same bits wherever the computation is the same."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from parity import (
    BALANCED,
    BF16,
    SHAPE,
    Case,
    Outcome,
    Share,
    build_step,
    compiling_with,
    local_rows,
    merge,
    relative_difference,
    run_layout,
    run_reference,
)
from ranks import Ranks
from thorough import thorough
from torch import Tensor
from torch._dynamo.utils import counters

from dtlayout.ops.grouped import GroupedMatmul, StackedLinear
from dtlayout.ops.scaled import multiply_rowwise, multiply_tensorwise
from dtlayout.ops.scaled_groups import SCALED_LOOPS
from dtlayout.plans.plan import make_plan
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import Precision

FORMATS = ["fp8-tensorwise", "fp8-rowwise"]
WIDE = replace(SHAPE, hidden_size=64, ffn_size=96, num_layers=2)
BIASED = replace(WIDE, family="qwen2", qkv_bias=True)
MIXED = replace(BALANCED, hidden_size=64, ffn_size=96, num_layers=2, experts=replace(BALANCED.experts, ffn_size=32))
SPLIT = {
    "tp": Layout(dp_shard=2, tp=2, sequence_parallel=False),
    "tp with sequence parallelism": Layout(dp_shard=2, tp=2, recompute="full"),
    "split backwards": Layout(pp=2, tp=2, schedule="zb-h1"),
}
GATHERED = [
    Layout(dp_shard=4, zero=3),
    Layout(dp_replicate=2, dp_shard=2, zero=2, recompute="full"),
    Layout(dp_shard=2, tp=2, zero=3, offload="optimizer"),
    Layout(pp=2, dp_shard=2, zero=3, schedule="zb-h1"),
    Layout(dp_shard=2, cp=2, zero=3, offload="activations"),
    Layout(pp=2, tp=2, schedule="interleaved-1f1b", virtual_stages=2),
    Layout(dp_shard=2, tp=2, ep=2, zero=3),
]
"""Experts where ep splits them."""


def case_of(layout: Layout, name: str, **changes: Any) -> Case:
    return replace(Case(layout, model=WIDE, precision=Precision(matmuls=name), global_batch=8), **changes)


def run_compiled(case: Case) -> tuple[Share, int, int]:
    """The step, with graphs and breaks of torch.compile."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True), compiling_with("aot_eager"):
        outcome = run_layout(case)
    return outcome, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def gather_in_bf16(case: Case) -> Share:
    """The step, with tensors gathered before they are cast."""
    with mock.patch("dtlayout.plans.plan.gathers_cast", return_value=False):
        return run_layout(case)


def gather_weights_in_bf16(case: Case) -> Share:
    """The step, with weights gathered before they are cast."""
    with mock.patch("dtlayout.plans.plan.gathers_scaled", return_value=False):
        return run_layout(case)


def multiply_one_by_one(
    x: Tensor, weight: Tensor, ends: Tensor, kernel: GroupedMatmul, scores: Tensor | None = None
) -> Tensor:
    """Each expert as a linear layer in fp8 of its own."""
    multiply = {"fp8-tensorwise": multiply_tensorwise, "fp8-rowwise": multiply_rowwise}
    (name,) = (name for name, each in SCALED_LOOPS.items() if each is kernel)
    rows = x if scores is None else (x * scores[:, None]).to(x.dtype)
    parts = zip(rows.tensor_split(ends[:-1].long().cpu()), weight, strict=True)
    return torch.cat([multiply[name](part, matrix) if len(part) else part @ matrix.t() for part, matrix in parts])


def run_one_by_one(case: Case) -> Share:
    with mock.patch.object(StackedLinear, "multiply", staticmethod(multiply_one_by_one)):
        return run_layout(case)


def find_loss(case: Case) -> float:
    """The loss of the case's last step."""
    _, step = build_step(case)
    rows, targets = local_rows(case)
    return [step(rows, targets).loss for _ in range(case.num_steps)][-1]


def train(ranks: Ranks, case: Case, run: Callable[..., Any] = run_layout) -> Outcome:
    return merge(ranks.run(run, case, timeout_s=120))


def find_difference(outcome: Outcome, expected: Outcome) -> float:
    """Of all gradients together: of a small one alone, rounding may move much."""
    assert outcome.gradients.keys() == expected.gradients.keys()
    found, wanted = (
        np.concatenate([each.gradients[name].ravel() for name in expected.gradients]) for each in (outcome, expected)
    )
    return relative_difference(found, wanted)


def have_same_bits(one: Outcome, other: Outcome) -> bool:
    same = [np.array_equal(one.gradients[name], each) for name, each in other.gradients.items()]
    return all(same) and one.loss == other.loss


@pytest.mark.parametrize("name", FORMATS)
def test_a_step_is_torchaos_and_recomputation_offload_and_shards_change_no_bit(ranks4: Ranks, name: str) -> None:
    """But for the order in which microbatches and ranks are added up; torchao's layers add microbatches up in bf16."""
    case = case_of(Layout(dp_shard=4), name, model=BIASED)
    expected, found = run_reference(case), train(ranks4, case)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6) and find_difference(found, expected) < 0.005
    in_bf16 = run_reference(replace(case, precision=Precision()))
    assert find_difference(in_bf16, expected) > 0.02, "fp8 is not bf16"
    for recompute, offload in (("full", "none"), ("selective", "both")):
        layout = Layout(dp_shard=4, recompute=recompute, offload=offload)
        assert have_same_bits(train(ranks4, replace(case, layout=layout)), found), layout
    sharded = train(ranks4, replace(case, layout=Layout(dp_shard=4, zero=3)))
    assert sharded.loss == found.loss and find_difference(sharded, found) < 1e-5


@pytest.mark.parametrize("name", FORMATS)
def test_ranks_of_tp_and_split_backwards_train_as_one_process(ranks4: Ranks, name: str) -> None:
    found = {which: train(ranks4, case_of(layout, name)) for which, layout in SPLIT.items()}
    expected = run_reference(case_of(SPLIT["tp"], name))
    for outcome in found.values():
        assert outcome.loss == pytest.approx(expected.loss, rel=1e-4)
        assert outcome.grad_norm == pytest.approx(expected.grad_norm, rel=2e-3)
        assert find_difference(outcome, expected) < 0.05
    whole = train(ranks4, case_of(replace(SPLIT["split backwards"], schedule="1f1b"), name))
    assert have_same_bits(found["split backwards"], whole)


@pytest.mark.parametrize("layout", [SPLIT["tp with sequence parallelism"], SPLIT["split backwards"]], ids=str)
def test_what_is_gathered_in_fp8_has_the_bits_of_what_is_cast_later(ranks4: Ranks, layout: Layout) -> None:
    case = case_of(layout, "fp8-tensorwise", model=BIASED)
    styles = make_plan(case.model, layout, case.kernels, case.precision).tensor.values()
    assert {"input-gather-cast", "rowwise-scatter-cast"} < {*styles}
    assert have_same_bits(train(ranks4, case), train(ranks4, case, gather_in_bf16))


@pytest.mark.parametrize("layout", GATHERED, ids=str)
def test_weights_that_are_gathered_in_fp8_have_the_bits_of_what_is_cast_later(ranks4: Ranks, layout: Layout) -> None:
    case = case_of(layout, "fp8-tensorwise", model=MIXED if layout.ep > 1 else BIASED, num_steps=2)
    found, expected = train(ranks4, case), train(ranks4, case, gather_weights_in_bf16)
    assert have_same_bits(found, expected)
    assert all(np.array_equal(found.parameters[name], each) for name, each in expected.parameters.items())


@pytest.mark.parametrize("name", ["fp8-tensorwise", thorough("fp8-rowwise")])
def test_each_expert_has_the_bits_of_a_linear_layer_and_split_backwards_change_none(ranks4: Ranks, name: str) -> None:
    layout = Layout(dp_shard=2, tp=2, ep=2, zero=3, recompute="selective")
    case = case_of(layout, name, model=replace(MIXED, num_layers=2))
    found = train(ranks4, case)
    assert have_same_bits(found, train(ranks4, case, run_one_by_one))
    grouped = train(ranks4, replace(case, kernels=Kernels(experts="grouped")))
    assert grouped.loss != found.loss and find_difference(grouped, found) > 0.01, "the grouped kernel stays in bf16"
    case = replace(case, layout=Layout(pp=2, dp_shard=2, ep=2, schedule="zb-h1"))
    assert have_same_bits(
        train(ranks4, case), train(ranks4, replace(case, layout=replace(case.layout, schedule="1f1b")))
    )


@pytest.mark.parametrize("name", ["fp8-tensorwise", thorough("fp8-rowwise")])
def test_compiled_blocks_are_one_graph_and_compute_the_same(ranks4: Ranks, name: str) -> None:
    case = case_of(Layout(dp_shard=2, tp=2, recompute="selective"), name, model=replace(WIDE, num_layers=2))
    plain = train(ranks4, case)
    found = ranks4.run(run_compiled, replace(case, kernels=Kernels(compile="blocks")), timeout_s=180)
    assert [counts for _, *counts in found] == [[2, 0]] * 4, "of blocks and of the loss, and none breaks"
    compiled = merge([outcome for outcome, *_ in found])
    assert compiled.loss == pytest.approx(plain.loss, rel=1e-4) and find_difference(compiled, plain) < 0.05


def test_adapters_lie_beside_frozen_matmuls_in_fp8(ranks4: Ranks) -> None:
    model = replace(WIDE, adapter=Adapter(rank=4))
    split, whole = Layout(pp=2, tp=2, schedule="zb-h1"), Layout(dp_shard=4)
    found, expected = (
        ranks4.run(find_loss, case_of(layout, "fp8-tensorwise", model=model, num_steps=2)) for layout in (split, whole)
    )
    assert found == pytest.approx(expected, rel=1e-4)
    in_bf16 = ranks4.run(find_loss, Case(whole, model=model, precision=BF16, num_steps=2))
    assert all(abs(loss / other - 1) > 1e-6 for loss, other in zip(expected, in_bf16, strict=True))
