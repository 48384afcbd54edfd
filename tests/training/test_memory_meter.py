"""The memory meter: whose peak it reports, and that it remembers the largest."""

import pytest
from training_ranks import measured_peaks

from dtlayout.spec.layout import Layout

KIB = 1024


@pytest.mark.parametrize(
    ("layout", "largest_ranks"),
    [(Layout(pp=2, tp=2), [1, 3]), (Layout(dp_shard=4), [3]), (Layout(pp=4), [0, 1, 2, 3])],
    ids=["pp2 tp2", "dp4", "pp4"],
)
def test_each_pipeline_rank_reports_the_largest_of_its_other_axes(ranks4, layout, largest_ranks):
    sizes = [8, 32, 16]
    answers = ranks4.run(measured_peaks, layout, sizes)
    assert answers == [answers[0]] * 4  # every rank knows
    gathered, remembered = answers[0]
    for peaks, size in zip(gathered, sizes, strict=True):
        above = [peak - (rank + size) * KIB for peak, rank in zip(peaks, largest_ranks, strict=True)]
        assert all(0 <= rest < KIB / 2 for rest in above)  # a parameter of 4 bytes
    assert remembered == [None, gathered[0], gathered[1], gathered[1]]
