"""Every layout of a mixture of experts computes what one process computes."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from drawn import legal_cases
from hypothesis import HealthCheck, given, settings
from parity import (
    BALANCED,
    MIXTURE,
    Case,
    largest_difference,
    merge,
    on_one_expert,
    on_some_experts,
    run_layout,
    run_on_one_expert,
    run_on_some_experts,
    run_reference,
    skip_between_steps,
)
from ranks import Ranks
from thorough import mostly_thorough, thorough

from dtlayout.spec.layout import Layout

LAYOUTS = {
    "ep alone": Layout(dp_shard=4, ep=4),
    "shards of experts": Layout(dp_shard=4, ep=2, zero=3),
    "no ep": Layout(dp_shard=4, zero=2),
    "hsdp": Layout(dp_replicate=2, dp_shard=2, ep=2, zero=3, recompute="full"),
    "copies alone": Layout(dp_replicate=2, tp=2, ep=2),
    "tp without ep": Layout(dp_shard=2, tp=2, micro_batch=2),
    "tp": Layout(dp_shard=2, tp=2, ep=4, recompute="selective"),
    "tp overlapped": Layout(dp_shard=2, tp=2, ep=2, tp_overlap=True, zero=3),
    "cp": Layout(dp_shard=2, cp=2, ep=4, zero=2),
    "cp by heads": Layout(cp=2, cp_method="all-to-all", tp=2, ep=2, recompute="selective"),
    "cp and tp": Layout(cp=2, tp=2, ep=4, micro_batch=2, recompute="keep-matmuls"),
    "pp": Layout(pp=2, dp_shard=2, ep=2, zero=3),
    "pp and tp": Layout(pp=2, tp=2, ep=2, zero=2, recompute="full"),
    "interleaved": Layout(pp=2, dp_shard=2, ep=2, schedule="interleaved-1f1b", virtual_stages=3, recompute="every-2"),
    "split backwards": Layout(pp=2, dp_shard=2, ep=2, schedule="zb-h1", zero=3),
    "split backwards of tp": Layout(pp=2, tp=2, ep=2, schedule="zb-h1", recompute="keep-attention"),
    "split backwards in a V": Layout(pp=2, cp=2, ep=2, schedule="zb-v", virtual_stages=2, zero=2),
    "offloaded": Layout(dp_shard=4, ep=2, zero=3, offload="both", recompute="selective"),
    "offloaded and recomputed": Layout(dp_shard=2, tp=2, ep=4, offload="activations", recompute="full"),
}


SELDOM = ("no ep", "tp without ep", "cp", "pp", "offloaded and recomputed")
"""Layouts whose axes others have too."""


@pytest.mark.parametrize("name", mostly_thorough(LAYOUTS, lambda _, name: name not in SELDOM))
def test_every_layout_of_experts_is_exact_in_float64(ranks4: Ranks, name: str) -> None:
    case = Case(LAYOUTS[name], model=MIXTURE)
    size, whose = largest_difference(merge(ranks4.run(run_layout, case)), run_reference(case))
    assert size <= 1e-10, whose


@pytest.mark.parametrize("name", mostly_thorough(LAYOUTS, lambda _, name: name == "tp"))
def test_five_updates_of_a_balanced_router_are_exact_in_float64(ranks4: Ranks, name: str) -> None:
    """Biases that counts move, groups, and both losses of the router, whose experts' tokens a microbatch counts."""
    case = Case(LAYOUTS[name], model=BALANCED, num_steps=5)
    size, whose = largest_difference(merge(ranks4.run(run_layout, case)), run_reference(case))
    assert size <= 1e-10, whose


def test_a_step_that_is_left_out_moves_no_bias(ranks4: Ranks) -> None:
    assert ranks4.run(skip_between_steps, Case(LAYOUTS["shards of experts"], model=BALANCED)) == [True] * 4


@pytest.mark.parametrize(
    "name", [*map(thorough, ("ep alone", "shards of experts", "tp", "split backwards")), "cp and tp"]
)
def test_ranks_whose_experts_get_no_token_take_part(ranks4: Ranks, name: str) -> None:
    """All tokens go to one expert, or to experts of one rank alone; weights that are no shares have a gradient then."""
    assert MIXTURE.experts is not None
    model = replace(MIXTURE, experts=replace(MIXTURE.experts, normalized=False))
    case = Case(LAYOUTS[name], model=model)
    for choosing, run in ((on_one_expert, run_on_one_expert), (on_some_experts, run_on_some_experts)):
        with choosing():
            reference = run_reference(case)
        size, whose = largest_difference(merge(ranks4.run(run, case)), reference)
        assert size <= 1e-10, (run.__name__, whose)


@pytest.mark.parametrize("num_examples", [3, thorough(30)])
def test_random_layouts_of_experts_are_exact_in_float64(ranks4: Ranks, num_examples: int) -> None:
    @settings(max_examples=num_examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=legal_cases([MIXTURE, BALANCED, replace(MIXTURE, tied_embeddings=True)]))
    def is_exact(case: Case) -> None:
        size, whose = largest_difference(merge(ranks4.run(run_layout, case)), run_reference(case))
        assert size <= 1e-10, (case, whose)

    is_exact()


ON_EIGHT = [
    Layout(pp=2, cp=2, tp=2, ep=4, zero=3, recompute="full"),
    Layout(pp=2, cp=2, tp=2, ep=2, schedule="zb-h1", zero=2),
]
MORE_ON_EIGHT = [
    Layout(pp=2, dp_replicate=2, tp=2, ep=2, zero=1, recompute="selective"),
    Layout(dp_shard=2, cp=2, tp=2, ep=8, zero=3),
    Layout(dp_shard=8, ep=2, zero=3),
]


@pytest.fixture(scope="module")
def ranks8() -> Iterator[Ranks]:
    pool = Ranks(8)
    yield pool
    pool.close()


@pytest.mark.parametrize("layouts", [ON_EIGHT, thorough(MORE_ON_EIGHT)], ids=["usual", "more"])
def test_experts_beside_all_axes_are_exact_on_eight_ranks(ranks8: Ranks, layouts: list[Layout]) -> None:
    """The last one shards four ranks' two experts over four, by rows of their matrices."""
    for layout in layouts:
        case = Case(layout, model=MIXTURE)
        size, whose = largest_difference(merge(ranks8.run(run_layout, case, timeout_s=120)), run_reference(case))
        assert size <= 1e-10, (layout, whose)
