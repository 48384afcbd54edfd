"""The optimizer's state in bf16, offered where a layout does not fit with it in the parameters' format."""

from dataclasses import replace
from typing import NamedTuple

from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.scenario import Scenario
from dtlayout.spec.optimizers import STATE_FORMAT, Optimizer, RoleOptimizer, StateFormat
from dtlayout.spec.precision import BYTES

COARSE: StateFormat = "bfloat16"
MEANING = "keeps the optimizer's state in bf16, which changes the numbers a little"


class CoarseState(NamedTuple):
    """A scenario whose optimizer keeps its state in bf16."""

    scenario: Scenario
    overrides: tuple[str, ...]
    """Arguments of `dtlayout train` that ask for it."""

    @property
    def option(self) -> str:
        """Argument of recommend that asks for it."""
        optimizer = self.scenario.optimizer
        pairs = (f"{key}={value}" for key, value in optimizer.given.items())
        return f"--optimizer {','.join([optimizer.name, *pairs])}"


def find_coarse_state(scenario: Scenario) -> CoarseState | None:
    """The scenario with all state in bf16 that can be; None if that spares nothing, or if the optimizer refuses it."""
    before = scenario.optimizer
    try:
        optimizer, keys = _coarsen(before)
    except InvalidConfig:
        return None
    size = BYTES[scenario.precision.params]
    if sum(part.state_bytes(size) for part in optimizer.parts) >= sum(part.state_bytes(size) for part in before.parts):
        return None
    return CoarseState(replace(scenario, optimizer=optimizer), tuple(f"--optimizer.{key}={COARSE}" for key in keys))


def _coarsen(optimizer: Optimizer) -> tuple[Optimizer, list[str]]:
    """The optimizer with its state in bf16, and the keys that say so."""
    keys = list[str]()
    if getattr(optimizer, STATE_FORMAT, None) == "":
        optimizer, keys = replace(optimizer, state_format=COARSE), [STATE_FORMAT]  # type: ignore[call-arg]
    if isinstance(optimizer, RoleOptimizer):
        rest, more = _coarsen(optimizer.rest)
        optimizer, keys = replace(optimizer, rest=rest), [*keys, *(f"rest.{key}" for key in more)]
    return optimizer, keys
