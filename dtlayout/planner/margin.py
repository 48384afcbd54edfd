"""Margin: how much of a GPU's memory a recommended layout leaves free, by how far predicted peaks have been off.

A layout whose predicted peak is the capacity runs out of memory as often as not. So by default a search fills only 1/q
of the capacity, where three of four peaks that were measured where as little was known stayed below q times the
predicted one (`Interval.upper_quartile`). Where nobody has counted that, a share stands for it: 0.95 for our own engine
on a GPU type that it was measured on, since its peaks are predicted with a median error of 2 to 4 %, and else 0.92. The
memory of a CPU has no such edge: nothing is kept free there.

The whole range of peaks, up to high times the predicted one, would refuse many layouts that run, so no more than
`1 - _LEAST_SHARE` is kept free. For the same reason a model that fits only without the margin is still answered, and
told so (`commands/recommend.py`).
"""

from typing import NamedTuple

from dtlayout.costmodel.engine import OWN_ENGINE
from dtlayout.costmodel.scenario import Scenario
from dtlayout.records.intervals import find_intervals

_OWN_SHARE, _OTHER_SHARE, _LEAST_SHARE = 0.95, 0.92, 0.85


class Margin(NamedTuple):
    """The share of the capacity that a search may fill, and why."""

    max_memory: float
    """Share of the capacity, above 0 and at most 1."""
    why: str
    """The reason, as the end of a sentence."""
    is_asked: bool = False
    """Whether a user has said the share."""
    fits_only_without: bool = False
    """Whether nothing fits with the default margin, so that it was given up."""

    def without(self) -> "Margin":
        """The margin given up, since nothing fits with it."""
        why = f"nothing fits in {self.max_memory:.0%}, which {self.why}"
        return Margin(1.0, why, fits_only_without=True)


def choose_margin(scenario: Scenario, asked: float | None) -> Margin:
    """The share that a user asked for, or else the default of a scenario."""
    if asked is not None:
        return Margin(asked, "is what was asked for", is_asked=True)
    if scenario.is_on_host:
        return Margin(1.0, "leaves no margin, since ranks share the host's memory")
    if (quartile := find_intervals(scenario).peak_memory.upper_quartile) is not None:
        share = max(_LEAST_SHARE, int(100 / max(1.0, quartile)) / 100)
        return Margin(share, f"leaves room, since one of four measured peaks passed {quartile:.2f} times the predicted")
    is_own = scenario.engine.name == OWN_ENGINE and scenario.engine.is_calibrated
    share = _OWN_SHARE if is_own else _OTHER_SHARE
    return Margin(share, f"leaves {1 - share:.0%} for the errors of predicted peaks")
