"""Trackers: the programs that show a run while it goes on, for `metrics.to`; a record each, and `register_tracker`.

A record is all that checks know of a tracker. Nothing of it is imported before the rank that writes opens it.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from dtlayout.base.errors import InvalidConfig
from dtlayout.spec.kernel_table import Package, is_installed


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """One program that numbers of a run are sent to."""

    name: str
    """What `metrics.to` calls it."""
    package: Package
    """What it needs."""
    session: str
    """The `Session` of training/trackers.py that writes to it, as "module:name"; it is called with a `Start`."""


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
"""Every tracker by its name."""


def register_tracker(tracker: Tracker) -> None:
    """Make a tracker of your own a choice of `metrics.to`; InvalidConfig if its name is taken."""
    if tracker.name in TRACKERS:
        raise InvalidConfig(f"the tracker {tracker.name!r} is there already; give yours another name")
    TRACKERS[tracker.name] = tracker


def name_problems(names: Sequence[str]) -> list[str]:
    """What is wrong with the names in `metrics.to`."""
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
    """Which of these trackers are not installed here, and how to get them."""
    packages = [(name, TRACKERS[name].package) for name in names]
    return [
        f"metrics.to has {name!r}: no package {package.module} here; install it: {package.install}"
        for name, package in packages
        if not is_installed(package.module)
    ]
