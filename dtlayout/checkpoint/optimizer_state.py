"""The optimizer's state of each parameter, made where a checkpoint or a first step finds it missing."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from dtlayout.models.families import find_weight
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import Optimizer


def fill_state(
    optimizer: torch.optim.Optimizer,
    modules: Sequence[nn.Module],
    model: ModelShape,
    settings: Optimizer,
    num_steps: int = 0,
    make: Callable[..., torch.Tensor] = torch.zeros_like,
) -> None:
    """Make optimizer state for each trained parameter that has none: zeros, and the count `num_steps` where the
    optimizer counts steps.

    With `num_steps` 0 the next update is the same as without that state. `make` makes the tensors.
    """
    for name, parameter in (named for module in modules for named in module.named_parameters()):
        weight = find_weight(model, name)
        if not weight.trains or (state := optimizer.state[parameter]):
            continue
        part = settings.of_role(weight.role)
        if part.step_bytes:
            state["step"] = torch.tensor(float(num_steps), device=parameter.device)
        for kind, number_format in part.state.items():
            state[kind] = make(parameter, dtype=number_format and getattr(torch, number_format))


def set_updates(optimizer: torch.optim.Optimizer, num_updates: int) -> None:
    """Have an optimizer that counts its updates go on after `num_updates`: fewer than steps, if some were left out."""
    for kept in optimizer.state.values():
        if "step" in kept:
            kept["step"].fill_(num_updates)
