"""What the fastest rows of each sweep have in common."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from dtlayout.planner.runs import Run
from dtlayout.report.chance import MOST_CHANCE, deal, number, rarity


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


_FASTEST = 0.1
"""Share of a sweep's rows that are its fastest."""
CHOICES: dict[str, Callable[[Run], Hashable]] = {
    "micro_batch": lambda run: run.layout.micro_batch,
    "tp": lambda run: run.layout.tp,
    "pp": lambda run: run.layout.pp,
    "recompute": lambda run: run.layout.recompute,
    "attention": lambda run: run.kernels.attention,
    "norm": lambda run: run.kernels.norm,
    "sequence_parallel": lambda run: ("on" if run.layout.shards_sequence else "off") if run.layout.tp > 1 else None,
}
"""Name of a choice → what a row chose; None where there is nothing to choose."""


def list_options(name: str, runs: Sequence[Run]) -> list[Hashable]:
    """What the rows chose, in order."""
    options = {CHOICES[name](run) for run in runs} - {None}
    return sorted(options, key=lambda option: (isinstance(option, str), option))


def find_common(runs: Sequence[Run]) -> list[Common]:
    """For each choice with several values, the one that the fastest tenth of each sweep favours most."""
    ran = [run for run in runs if run.tokens_per_s_per_gpu]
    if not ran:
        return []
    tables, speeds = number([run.table for run in ran]), np.array([run.tokens_per_s_per_gpu for run in ran])
    fastest = _fastest(speeds[:, None], tables)
    dealt = _fastest(deal(speeds, tables), tables)
    common = []
    for name, choice in CHOICES.items():
        names, chosen = list_options(name, ran), [choice(run) for run in ran]
        if len(names) < 2:
            continue
        options = np.array([[value == option for value in chosen] for option in names], dtype=float)
        shares = options @ fastest / fastest.sum()  # options × 1
        gains = shares - options.mean(axis=1, keepdims=True)
        best = int(np.argmax(gains))
        chances = (options @ dealt / fastest.sum() - options.mean(axis=1, keepdims=True)).max(axis=0)
        share, share_of_all = float(shares[best, 0]), float(options[best].mean())
        common.append(Common(name, names[best], share, share_of_all, p=rarity(chances, gains[best])))
    return common


def _fastest(speeds: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """1 for the rows that are of the fastest tenth of their table, at least one of each; rows × deals."""
    found = np.zeros(speeds.shape)
    for table in np.unique(tables):
        places = np.flatnonzero(tables == table)
        number = max(1, round(_FASTEST * len(places)))
        order = np.argsort(-speeds[places], axis=0, kind="stable")[:number]
        np.put_along_axis(found, places[order], 1.0, axis=0)
    return found
