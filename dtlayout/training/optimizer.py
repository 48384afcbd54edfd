"""The optimizer over all stages of a rank, and the learning rate of each step."""

import math
import pkgutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import plural
from dtlayout.checkpoint.optimizer_state import fill_state
from dtlayout.models.families import find_weight
from dtlayout.plans.disk import DiskState
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import Optimizer

_LR_SHARE = "lr_share"
"""Key of a parameter group: its learning rate as a share of [optimizer]'s."""


def build_optimizer(
    modules: Sequence[nn.Module], model: ModelShape, settings: Optimizer, disk: DiskState | None = None
) -> torch.optim.Optimizer:
    """torch's optimizer over the trained parameters of a model's stages; one over several where roles share them.

    The model's description says which parameters are trained, and each one's role. The learning rate comes with each
    step. Where the state lies on `disk` there is one for each unit, and its state is there from the beginning.
    InvalidConfig if torch's class does not take its parameters, or the disk has no room for the state.
    """
    named = [each for module in modules for each in module.named_parameters() if find_weight(model, each[0]).trains]
    if disk is None:
        built = _build_parts(named, model, settings)
        return built[0] if len(built) == 1 else JointOptimizer(built)
    units = {id(parameter): number for number, unit in enumerate(disk.units) for parameter in unit.parameters}
    by_unit: dict[int, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in named:
        by_unit[units[id(parameter)]].append((name, parameter))
    optimizer = DiskOptimizer({n: _build_parts(by_unit[n], model, settings) for n in sorted(by_unit)}, disk)
    if disk.folder:
        fill_state(optimizer, modules, model, settings, make=torch.empty_like)  # no page of it is touched
        disk.place_state(optimizer.state)
    return optimizer


def _build_parts(
    named: Sequence[tuple[str, nn.Parameter]], model: ModelShape, settings: Optimizer
) -> list[torch.optim.Optimizer]:
    """torch's optimizers of trained parameters, given with their names: one for each part that has some."""
    by_part: dict[Optimizer, dict[float, list[nn.Parameter]]] = {part: defaultdict(list) for part in settings.parts}
    for name, parameter in named:
        weight = find_weight(model, name)
        part = settings.of_role(weight.role)
        by_part[part][part.decay_of(weight.role)].append(parameter)
    return [_build_part(part, part.lr / settings.lr, by_decay) for part, by_decay in by_part.items() if by_decay]


def _build_part(
    part: Optimizer, lr_share: float, by_decay: Mapping[float, list[nn.Parameter]]
) -> torch.optim.Optimizer:
    """torch's optimizer of one part, over parameters by their weight decay, the highest first."""
    make, decays = pkgutil.resolve_name(part.torch_class), sorted(by_decay, reverse=True)
    tables = [{"params": by_decay[decay], "weight_decay": decay, _LR_SHARE: lr_share} for decay in decays]
    try:
        built: torch.optim.Optimizer = make(tables, lr=0.0, **part.torch_arguments)
    except ValueError as error:
        raise InvalidConfig(
            f"optimizer.name={part.name}: {part.torch_class} refuses the weights that it gets: {error}; an optimizer "
            f"of some weights alone is a RoleOptimizer, which says their roles"
        ) from error
    return built


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers as one: each updates its own parameters, and the state of all lies in one place."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        """`optimizers` share no parameter; there may be none, in a stage where nothing is trained."""
        super().__init__([group for each in optimizers for group in each.param_groups] or [{"params": []}], {})
        self.optimizers = optimizers
        for each in optimizers:
            each.state = self.state
        self._step_supports_amp_scaling = all(getattr(o, "_step_supports_amp_scaling", False) for o in optimizers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters, or none where the flag that GradScaler made says so."""
        self._update(self.optimizers)

    def _update(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for each in optimizers:
            if self._step_supports_amp_scaling:
                each.found_inf = getattr(self, "found_inf", None)  # type: ignore[attr-defined]
                each.grad_scale = getattr(self, "grad_scale", None)  # type: ignore[attr-defined]
            each.step()


class DiskOptimizer(JointOptimizer):
    """An optimizer that updates unit after unit, with the state of few of them in memory."""

    def __init__(self, by_unit: Mapping[int, Sequence[torch.optim.Optimizer]], disk: DiskState):
        """`by_unit` has the optimizers of each of the disk's units in which something is trained, by its number."""
        super().__init__([each for optimizers in by_unit.values() for each in optimizers])
        self._by_unit, self._disk = by_unit, disk

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters, or none where the flag that GradScaler made says so."""
        for number in self._disk.each_update([*self._by_unit]):
            self._update(self._by_unit[number])


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` from the next step on, or where several optimizers share the model each one's share of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(_LR_SHARE, 1.0)


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning rate of each step of a run. A checkpoint keeps these numbers, so that a resumed run falls over as
    many steps as it began with, unless its settings name another number.

    Linear warm-up to `lr`, then half a cosine down to `min_lr_ratio · lr` at the last of `decay_steps`, where it stays.
    """

    lr: float
    min_lr_ratio: float
    warmup_steps: int
    decay_steps: int

    @classmethod
    def of(cls, settings: Optimizer, num_steps: int, saved: Mapping[str, Any]) -> Self:
        """The learning rate of a run of `num_steps`.

        `lr`, `min_lr_ratio` and `warmup_steps` come from the settings, and so does `decay_steps`, unless it is 0 there.
        Then it comes from `saved`, or is `num_steps` if `saved` has none.
        """
        return cls(
            lr=settings.lr,
            min_lr_ratio=settings.min_lr_ratio,
            warmup_steps=settings.warmup_steps,
            decay_steps=settings.decay_steps or int(saved.get("decay_steps", num_steps)),
        )

    def at(self, step: int) -> float:
        """The learning rate of a step; steps count from 0.

        >>> rate = LearningRate(lr=1.0, min_lr_ratio=0.5, warmup_steps=2, decay_steps=5)
        >>> [round(rate.at(step), 3) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.5]
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.decay_steps - 1 - self.warmup_steps)
        cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * cosine)

    def describe_resume(self, saved: Mapping[str, Any], done: int, num_steps: int) -> list[str]:
        """Notes for a run that goes on after `done` steps: the rate differs from the saved one, or the length does.

        Empty where the rate goes on as it was going to and ends with the run, or where nothing was saved.
        """
        if saved.keys() != asdict(self).keys() or done >= num_steps:
            return []
        before = type(self)(**saved)
        now = asdict(self)
        changes = [f"optimizer.{name} was {old} and is {now[name]}" for name, old in saved.items() if old != now[name]]
        notes = []
        if changes:
            notes.append(
                f"{', '.join(changes)}: the learning rate of step {done + 1} is {self.at(done):.2e}, and was going to "
                f"be {before.at(done):.2e}"
            )
        if before.decay_steps == self.decay_steps != num_steps:
            longer = type(self)(**{**asdict(self), "decay_steps": num_steps})
            notes.append(
                f"the learning rate falls over {plural(self.decay_steps, 'step')}, as when this run began, to "
                f"{self.at(num_steps):.2e}: that of step {done + 1} is {self.at(done):.2e}; with "
                f"optimizer.decay_steps={num_steps} it would be {longer.at(done):.2e}"
            )
        return notes
