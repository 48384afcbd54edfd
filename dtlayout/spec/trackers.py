"""Trackers: a record for each program in `metrics.to` that shows a run while it trains, and `register_tracker`.

Checks know a tracker by its record alone. Its module is imported when the rank that writes opens it.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from dtlayout.base.errors import InvalidConfig
from dtlayout.spec.kernel_records import Package
from dtlayout.spec.kernel_table import is_installed


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """One program that gets the numbers of a run."""

    name: str
    """Name in `metrics.to`."""
    package: Package
    """Python package that must be installed."""
    session: str
    """A `Session` of training/trackers.py that writes to the tracker, as "module:name"; called with a `Start`."""


TRACKERS = {
    tracker.name: tracker
    for tracker in (
        Tracker(
            name="tensorboard",
            package=Package("tensorboard", "pip install 'dtlayout[tensorboard]'"),
            session="dtlayout.training.trackers:TensorBoard",
        ),
        Tracker(
            name="wandb",
            package=Package("wandb", "pip install 'dtlayout[wandb]'"),
            session="dtlayout.training.trackers:WeightsAndBiases",
        ),
    )
}
"""Name → tracker, registered ones included."""


def register_tracker(tracker: Tracker) -> None:
    """Allow a tracker of your own in `metrics.to`; InvalidConfig if its name is taken."""
    if tracker.name in TRACKERS:
        raise InvalidConfig(f"the tracker {tracker.name!r} is there already; give yours another name")
    TRACKERS[tracker.name] = tracker


def name_problems(names: Sequence[str]) -> list[str]:
    """Problems with the names in `metrics.to`: unknown ones and repeated ones."""
    problems = []
    for name in dict.fromkeys(names):
        if name not in TRACKERS:
            near = difflib.get_close_matches(name, TRACKERS, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"use one of {list(TRACKERS)}"
            problems.append(f"metrics.to has {name!r}, which is unknown; {advice}")
        if names.count(name) > 1:
            problems.append(f"metrics.to has {name!r} twice")
    return problems


def package_problems(names: Sequence[str]) -> list[str]:
    """A problem for each of these trackers whose package is not installed here, with the command that installs it."""
    packages = [(name, TRACKERS[name].package) for name in names]
    return [
        f"metrics.to has {name!r}: no package {package.module} here; install it: {package.install}"
        for name, package in packages
        if not is_installed(package.module)
    ]
