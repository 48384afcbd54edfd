"""What the fastest rows of each sweep have in common."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from dtlayout.planner.runs import Run
from dtlayout.report.chance import MOST_CHANCE, deal, group, rarity
from dtlayout.report.questions import choose

_FASTEST = 0.1
"""Share of a sweep's rows that are its fastest."""
CHOICES = ("micro_batch", "tp", "pp", "recompute", "attention", "norm", "sequence_parallel")


@dataclass(frozen=True)
class Common:
    """What the fastest rows of each sweep have in common."""

    name: str
    """The choice."""
    value: Hashable
    """What most of them chose."""
    share: float
    """Share of the fastest rows that chose it."""
    share_of_all: float
    """Share of all rows that ran that chose it."""
    p: float
    """p-value: how often as many of rows picked at random chose one and the same."""

    def describe(self) -> str:
        """A sentence; "not supported" where chance could say it."""
        if self.p > MOST_CHANCE:
            return f"not supported: {self.name}={self.value} in {self.share:.0%} of them, chance has p = {self.p:.2g}"
        return f"{self.name}={self.value} in {self.share:.0%} of them, and in {self.share_of_all:.0%} of all that ran"


def list_options(name: str, runs: Sequence[Run]) -> list[Hashable]:
    """What the rows chose, in order."""
    options = {choose(run, name) for run in runs} - {None}
    return sorted(options, key=lambda option: (isinstance(option, str), option))


def find_common(runs: Sequence[Run]) -> list[Common]:
    """For each choice with several values, the one that the fastest tenth of each sweep favours most."""
    ran = [run for run in runs if run.tokens_per_s_per_gpu]
    tables = [run.table for run in ran]
    fastest = _find_fastest(deal(np.array([run.tokens_per_s_per_gpu for run in ran]), tables), tables)
    common = []
    for name in CHOICES:
        if len(names := list_options(name, ran)) > 1:
            options = np.array([[choose(run, name) == option for run in ran] for option in names], dtype=float)
            shares, shares_of_all = options @ fastest / fastest[:, 0].sum(), options.mean(axis=1)
            gains = shares - shares_of_all[:, None]  # options × (1 + deals)
            best = int(gains[:, 0].argmax())
            share, share_of_all = float(shares[best, 0]), float(shares_of_all[best])
            common.append(Common(name, names[best], share, share_of_all, p=rarity(gains.max(axis=0))))
    return common


def _find_fastest(speeds: np.ndarray, tables: Sequence[str]) -> np.ndarray:
    """1 for the rows that are of the fastest tenth of their table, at least one of each; rows × (1 + deals)."""
    found = np.zeros(speeds.shape)
    for places in map(np.array, group(tables)):
        number = max(1, round(_FASTEST * len(places)))
        order = np.argsort(-speeds[places], axis=0, kind="stable")[:number]
        np.put_along_axis(found, places[order], 1.0, axis=0)
    return found
