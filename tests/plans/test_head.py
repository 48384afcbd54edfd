"""A head split over the vocabulary is the head of one process, with everything that it may have."""

import pytest
from head_ranks import find_differences
from ranks import Ranks


@pytest.mark.parametrize("kernel", ["eager", "chunked", "linear"])
def test_loss_and_all_gradients_are_those_of_one_process(ranks4: Ranks, kernel: str) -> None:
    for differences in ranks4.run(find_differences, kernel):
        assert set(differences) == {"loss", "hidden", "weight", "bias"}
        assert max(differences.values()) < 1e-12, differences
