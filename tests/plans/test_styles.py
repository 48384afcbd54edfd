"""A norm on shards of the sequence is the norm of the whole, whatever computes it."""

import pytest
from norm_ranks import TORCH, find_differences
from ranks import Ranks

from dtlayout.spec.kernel_table import KERNELS


@pytest.mark.parametrize("kernel", [*KERNELS["norm"], TORCH])
def test_output_and_all_gradients_are_those_of_one_process(ranks4: Ranks, kernel: str) -> None:
    for differences in ranks4.run(find_differences, kernel):
        assert len(differences) == 4 and max(differences.values()) < 1e-14, differences
