"""Fine-tuning that takes less memory than training every weight: a LoRA, and a LoRA on a base of 4 bits."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from dtlayout.costmodel.engine import OWN_ENGINE
from dtlayout.costmodel.scenario import Scenario
from dtlayout.models.families import find_target_problems
from dtlayout.spec.adapter import Adapter
from dtlayout.spec.precision import BaseName

BASE: BaseName = "nf4"
"""Format of the base that is offered last."""


class FineTuning(NamedTuple):
    """One way to train less of a model."""

    scenario: Scenario
    options: tuple[str, ...]
    """Arguments of recommend that ask for it."""
    overrides: tuple[str, ...]
    """Arguments of `dtlayout train` that ask for it."""
    meaning: str


def list_fine_tunings(scenario: Scenario) -> Iterator[FineTuning]:
    """Ways to train less than a scenario does, by what they cost: none where it is at the last one already.

    A base of few bits is our own trainer's.
    """
    adapted, options, overrides = scenario, tuple[str, ...](), tuple[str, ...]()
    if scenario.model.adapter is None:
        adapted = replace(scenario, model=replace(scenario.model, adapter=Adapter()))
        options, overrides = ("--adapter lora",), ("--adapter.method=lora",)
        if find_target_problems(adapted.model):
            return
        yield FineTuning(adapted, options, overrides, "trains small matrices beside a frozen model")
    if scenario.engine.name == OWN_ENGINE and scenario.precision.base == "compute":
        yield FineTuning(
            replace(adapted, precision=replace(adapted.precision, base=BASE)),
            (*options, f"--precision base={BASE}"),
            (*overrides, f"--precision.base={BASE}"),
            f"{'trains small matrices beside a frozen model and ' * bool(options)}stores the frozen weights in 4 bits",
        )
