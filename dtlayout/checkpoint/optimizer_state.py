"""What an optimizer has for each parameter, where a checkpoint or a first step finds it missing."""

import torch

from dtlayout.spec.optimizers import Optimizer


def fill_state(optimizer: torch.optim.Optimizer, settings: Optimizer, num_steps: int = 0) -> None:
    """Give parameters that have no state one of zeros, from which the first update is the same, after `num_steps`."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if not (state := optimizer.state[parameter]):
            if settings.step_bytes:
                state["step"] = torch.tensor(float(num_steps), device=parameter.device)
            for name, number_format in settings.state.items():
                state[name] = torch.zeros_like(parameter, dtype=number_format and getattr(torch, number_format))


def set_updates(optimizer: torch.optim.Optimizer, num_updates: int) -> None:
    """Have an optimizer that counts its updates go on after so many: fewer than steps, where some were left out."""
    for kept in optimizer.state.values():
        if "step" in kept:
            kept["step"].fill_(num_updates)
