"""The optimizer over all stages of a rank, and the learning rate of each step."""

import math
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from dtlayout.base.formatting import plural
from dtlayout.models.families import describe
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import Optimizer


def build_optimizer(modules: Sequence[nn.Module], model: ModelShape, settings: Optimizer) -> torch.optim.Optimizer:
    """torch's optimizer over all parameters of a model's stages, each decaying where the model's description says so.

    The learning rate comes with each step.
    """
    parameters: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in (named for module in modules for named in module.named_parameters()):
        parameters[describe(model).find(model.aliases.get(name, name)).decays].append(parameter)
    groups = [
        {"params": some, "weight_decay": settings.weight_decay if decays else 0.0}
        for decays, some in parameters.items()
        if some
    ]
    make = pkgutil.resolve_name(settings.torch_class)
    built: torch.optim.Optimizer = make(groups, lr=0.0, **settings.torch_arguments)
    return built


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning rate of each step of a run, which goes on as it began: a checkpoint keeps these numbers.

    Linear warm-up to `lr`, then half a cosine down to `min_lr_ratio · lr` at the last of `decay_steps`, where it stays.
    """

    lr: float
    min_lr_ratio: float
    warmup_steps: int
    decay_steps: int

    @classmethod
    def of(cls, settings: Optimizer, num_steps: int, saved: Mapping[str, Any]) -> Self:
        """That of a run of so many steps; `saved` is what a checkpoint has of it, empty at the first start.

        What the settings name counts. Where they name no length, the saved one does.
        """
        return cls(
            lr=settings.lr,
            min_lr_ratio=settings.min_lr_ratio,
            warmup_steps=settings.warmup_steps,
            decay_steps=settings.decay_steps or int(saved.get("decay_steps", num_steps)),
        )

    def at(self, step: int) -> float:
        """Of a step; they count from 0.

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
        """What somebody should know who goes on after `done` steps: another rate than was saved, or another length.

        Nothing where the rate goes on as it was going to and ends with the run, or where nothing was saved.
        """
        if saved.keys() != asdict(self).keys() or done >= num_steps:
            return []
        before = type(self)(**saved)
        now = asdict(self)
        changes = [f"optimizer.{name} was {old} and is {now[name]}" for name, old in saved.items() if old != now[name]]
        if changes:
            return [
                f"{', '.join(changes)}: the learning rate of step {done + 1} is {self.at(done):.2e}, and was going to "
                f"be {before.at(done):.2e}"
            ]
        if self.decay_steps == num_steps:
            return []
        longer = type(self)(**{**asdict(self), "decay_steps": num_steps})
        return [
            f"the learning rate falls over {plural(self.decay_steps, 'step')}, as when this run began, to "
            f"{self.at(num_steps):.2e}: that of step {done + 1} is {self.at(done):.2e}; with "
            f"optimizer.decay_steps={num_steps} it would be {longer.at(done):.2e}"
        ]
