"""Imbalance of experts in each sweep: how full the fullest of ep's ranks was, beside what predictions took for it.

Imbalance: copies of tokens that the fullest of ep's ranks computes, over the mean of these ranks; 1 is even.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dtlayout.base.formatting import plural
from dtlayout.costmodel.scenario import fullest_share
from dtlayout.records.run import Run

_NEAR = 1.1
"""Factor within which a measured imbalance is as predicted: ep's ranks wait so much longer for the fullest one."""


@dataclass(frozen=True)
class SweepImbalance:
    """Measured and predicted imbalance of the rows of one sweep that shared experts among ranks."""

    table: str
    """The sweep."""
    num_rows: int
    """Rows with ep above 1 whose imbalance was measured."""
    measured: float
    """Median of the measured imbalances."""
    predicted: float
    """Median of the imbalances that predictions of these rows take."""

    @property
    def is_as_predicted(self) -> bool:
        """Whether another `experts.imbalance` would change little in predictions."""
        return 1 / _NEAR <= self.measured / self.predicted <= _NEAR

    def describe(self) -> str:
        """A sentence without a full stop, with the key to set where the two differ."""
        found = (
            f"{self.table}: the fullest of ep's ranks computed {self.measured:.2f} times the mean, median of "
            f"{plural(self.num_rows, 'layout')}, and predictions took {self.predicted:.2f}"
        )
        return found if self.is_as_predicted else f"{found}; --model.experts.imbalance={self.measured:.2f} predicts so"


def find_imbalances(runs: Sequence[Run]) -> list[SweepImbalance]:
    """The imbalance of each sweep that has rows with ep above 1 and a measured imbalance."""
    shared: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        measured = run.measured.expert_imbalance
        if measured is not None and run.layout.ep > 1:
            shared.setdefault(run.table, []).append((measured, fullest_share(run.scenario, run.layout)))
    return [
        SweepImbalance(table, len(pairs), *(median(values) for values in zip(*pairs, strict=True)))
        for table, pairs in shared.items()
    ]
