"""The optimizer over all stages of a rank, and the learning rate of each step."""

import math
import pkgutil
from collections.abc import Sequence

import torch
from torch import nn

from dtlayout.model_shape import ModelShape
from dtlayout.models.families import describe
from dtlayout.optimizers import Optimizer


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


def learning_rate(step: int, num_steps: int, *, peak: float, warmup_steps: int, min_ratio: float) -> float:
    """Linear warm-up to `peak`, then half a cosine down to `min_ratio · peak` at the last step; steps count from 0.

    >>> [round(learning_rate(s, 5, peak=1.0, warmup_steps=2, min_ratio=0.5), 3) for s in range(5)]
    [0.5, 1.0, 1.0, 0.75, 0.5]
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, num_steps - 1 - warmup_steps)
    return peak * (min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * min(1.0, progress))) / 2)
