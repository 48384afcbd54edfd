"""Beside: frozen models that stay on the GPUs while another one is trained, as reference and reward models do.

A frozen model has no gradients and no optimizer's state. It is cut by tp and pp as the trained one is, and under ZeRO-3
its weights are sharded too. Its forward goes over the same sequences, once a step. Generating samples is not predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dtlayout.base.errors import InvalidLayout
from dtlayout.costmodel.estimate import Estimate, Estimator
from dtlayout.costmodel.memory import count_stage_parameters
from dtlayout.costmodel.scenario import Scenario
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import BYTES


@dataclass(frozen=True)
class FrozenModel:
    """A frozen model beside the trained one."""

    name: str
    weight_bytes: float
    """Bytes of its weights on the fullest rank."""
    forward_s: float
    """Seconds of a step that its forwards take at least: gathering its weights is not in it."""


@dataclass(frozen=True)
class Beside:
    """Frozen models beside a layout."""

    models: tuple[FrozenModel, ...]
    peak_bytes: float
    """Peak of the fullest rank with all of them."""
    capacity_bytes: float
    step_time_s: float
    """Seconds of a step with all of their forwards."""

    @property
    def fits(self) -> bool:
        """True if all fit together."""
        return self.peak_bytes <= self.capacity_bytes


def weigh_beside(scenario: Scenario, now: Estimate, models: Sequence[ModelShape]) -> Beside:
    """Frozen models beside a layout; InvalidLayout for a model that cannot be cut so."""
    found = tuple(_weigh(replace(scenario, model=model), now) for model in models)
    return Beside(
        models=found, peak_bytes=now.peak_bytes + sum(each.weight_bytes for each in found),
        capacity_bytes=now.capacity_bytes, step_time_s=now.step_time_s + sum(each.forward_s for each in found),
    )  # fmt: skip


def _weigh(scenario: Scenario, now: Estimate) -> FrozenModel:
    """One frozen model, of a scenario in which it is the trained one."""
    layout, model = replace(now.layout, stage_layers=(), recompute="none", offload="none"), scenario.model
    if problems := layout.problems(model, scenario.batch):
        raise InvalidLayout([f"{model.name} beside it: {problem}" for problem in problems])
    estimator = Estimator(scenario)
    stages = estimator.stages(layout)
    parameters = max(
        sum(count_stage_parameters(model, chunk, layout.tp, layout.ep) for chunk in layout.placement.take(stages, rank))
        for rank in range(layout.pp)
    )
    shards = layout.dp_shard * layout.cp if layout.zero == 3 else 1
    work = estimator.work(layout, now.kernels)
    m = layout.num_microbatches(scenario.batch)
    ranks_s = [sum(each.forward_s for each in layout.placement.take(work, rank)) for rank in range(layout.pp)]
    # Forwards alone fill a pipeline once: all microbatches on the slowest rank, behind one on each of the others.
    forward_s = m * max(ranks_s) + (sum(ranks_s) - max(ranks_s)) / layout.virtual_stages
    return FrozenModel(model.name, parameters * BYTES[scenario.precision.compute] / shards, forward_s)
