"""Garbage collection at the same steps on all ranks.

Python collects garbage when enough objects have been made, so each rank stops at another moment, for tenths of a
second, and all others wait for it. Here no rank collects by itself while steps run.
"""

import gc

from dtlayout.training.observer import ObservedStep, Observer


class GarbageObserver(Observer):
    """Collects garbage after every so many steps; whoever runs the steps has Python collect again after them."""

    def __init__(self, every: int):
        """`every` is in steps; 0 changes nothing."""
        self._every = every

    def at_start(self) -> None:
        """Collect what building the run has left, and have Python collect no more."""
        if self._every:
            gc.collect()
            gc.disable()

    def after_step(self, step: ObservedStep) -> None:
        """Collect what is young: old objects belong to the run, and looking through them takes long."""
        if self._every and step.number % self._every == 0:
            gc.collect(1)
