"""Trainings with weights rounded to few bits: the same numbers in every layout as on one process."""

from dataclasses import replace

import pytest
import torch
from drawn import legal_cases
from hypothesis import HealthCheck, given, settings
from parity import BF16, EXACT, SHAPE, Case, compiling_with, largest_difference, merge, run_layout, run_reference
from ranks import Ranks
from thorough import thorough
from torch._dynamo.utils import counters

from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout

WIDE = replace(SHAPE, hidden_size=256, ffn_size=256, num_layers=2)
"""With two groups of int4 in each row, so that two ranks of tp have whole ones."""
BIASED = replace(WIDE, family="qwen2", qkv_bias=True, tied_embeddings=True)
LAYOUTS = {
    "split backwards": Layout(pp=2, dp_shard=2, zero=3, schedule="zb-h1"),
    "tp with sequence parallelism, recomputed": Layout(dp_shard=2, tp=2, recompute="selective", zero=3),
    "tp without": Layout(pp=2, tp=2, sequence_parallel=False, recompute="full"),
}


def find_difference(ranks: Ranks, case: Case) -> tuple[float, str]:
    return largest_difference(merge(ranks.run(run_layout, case, timeout_s=120)), run_reference(case))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_layouts_are_exact_in_float64(ranks4: Ranks, name: str) -> None:
    for which, layout in LAYOUTS.items():
        case = Case(layout, model=BIASED, precision=replace(EXACT, fake_quant=name), global_batch=8)
        size, whose = find_difference(ranks4, case)
        assert size <= 1e-10, (which, whose)
    size, _ = largest_difference(run_reference(case), run_reference(replace(case, precision=EXACT)))
    assert size > 1e-4, "rounded weights are not full ones"


@pytest.mark.parametrize("num_examples", [4, thorough(48)])
def test_random_legal_layouts_are_exact_in_float64(ranks4: Ranks, num_examples: int) -> None:
    @settings(max_examples=num_examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=legal_cases([WIDE, BIASED], overlaps_tp=False, fake_quants=("int8", "int4")))
    def is_exact(case: Case) -> None:
        size, whose = find_difference(ranks4, case)
        assert size <= 1e-10, whose

    is_exact()


def run_compiled(case: Case) -> tuple[object, int]:
    """The step with compiled blocks, and the graph breaks."""
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True), compiling_with("aot_eager"):
        outcome = run_layout(case)
    return outcome, sum(counters["graph_break"].values())


@pytest.mark.parametrize("name", [thorough("int8"), thorough("int4")])
def test_compiled_blocks_have_no_break_and_compute_the_same(ranks4: Ranks, name: str) -> None:
    layout = Layout(dp_shard=2, tp=2, recompute="selective")
    case = Case(layout, model=WIDE, precision=replace(BF16, fake_quant=name), global_batch=4)
    plain = merge(ranks4.run(run_layout, case, timeout_s=120))
    found = ranks4.run(run_compiled, replace(case, kernels=Kernels(compile="blocks")), timeout_s=180)
    assert [breaks for _, breaks in found] == [0] * 4
    compiled = merge([outcome for outcome, _ in found])
    assert compiled.loss == pytest.approx(plain.loss, rel=1e-4)
    assert compiled.grad_norm == pytest.approx(plain.grad_norm, rel=1e-2)
