"""Styles of norms: on shards of the sequence, on a rank's own heads, and beside what is frozen."""

import pytest
from norm_ranks import TORCH, find_differences
from own_module_ranks import NORMS, SCALE, STYLES, find_fused_differences
from own_module_ranks import find_differences as find_own_differences
from ranks import Ranks

from dtlayout.plans.style_table import STYLE_TABLE
from dtlayout.plans.styles import STYLES as KNOWN
from dtlayout.spec.kernel_table import KERNELS


@pytest.mark.parametrize("kernel", [*KERNELS["norm"], TORCH])
def test_output_and_all_gradients_are_those_of_one_process(ranks4: Ranks, kernel: str) -> None:
    for differences in ranks4.run(find_differences, kernel):
        assert len(differences) == 4 and max(differences.values()) < 1e-14, differences


def test_norms_of_heads_have_the_gradients_of_all_heads(ranks4: Ranks) -> None:
    for differences in ranks4.run(find_own_differences, STYLES | NORMS | SCALE, ()):
        assert len(differences) == 2 * 12 and max(differences.values()) < 1e-11, differences


@pytest.mark.parametrize("is_by_head", [True, False])
def test_one_matrix_of_q_k_and_v_is_split_right_where_its_rows_come_by_head(ranks4: Ranks, is_by_head: bool) -> None:
    for differences in ranks4.run(find_fused_differences, is_by_head):
        assert len(differences) == 2 * 4
        largest = max(differences.values())
        assert largest < 1e-7 if is_by_head else largest > 1, differences


def test_what_is_frozen_before_a_plan_stays_frozen(ranks4: Ranks) -> None:
    for differences in ranks4.run(
        find_own_differences, STYLES | NORMS | SCALE, ("q.weight", "o.bias", "k_norm.weight")
    ):
        assert len(differences) == 2 * 9 and max(differences.values()) < 1e-11, differences


def test_norms_of_heads_without_a_style_are_refused(ranks4: Ranks) -> None:
    for said in ranks4.run(find_own_differences, STYLES | SCALE, ()):
        assert said == "\n".join(
            f"plan.tensor: '*.{name}.weight' is trained beside matmuls that tp splits, and no style says on what it "
            f"works; say '*.{name}': 'head-norm' where a rank computes with its own heads or columns, or 'whole' where "
            f"all ranks compute the same"
            for name in ("q_norm", "k_norm")
        )


def test_the_table_has_every_style_that_is_carried_out() -> None:
    assert STYLE_TABLE.keys() == KNOWN.keys()
