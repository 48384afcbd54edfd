"""Muon on one process, a matrix at a time, as people write it who have whole weights."""

from collections.abc import Iterable

import torch
from torch import Tensor

from dtlayout.spec.optimizers import Muon


class WholeMuon(torch.optim.Optimizer):
    """Matrices and stacks of matrices, iterated in bf16 or, where that is their format, in float64."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], settings: Muon):
        super().__init__(list(parameters), {"lr": settings.lr})
        self.settings = settings

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update everything."""
        settings = self.settings
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].get("momentum_buffer", torch.zeros_like(parameter))
                momentum = self.state[parameter]["momentum_buffer"] = settings.momentum * momentum + parameter.grad
                wanted = parameter.grad + settings.momentum * momentum if settings.nesterov else momentum
                update = torch.stack([self._orthogonal(each) for each in wanted.view(-1, *parameter.shape[-2:])])
                rows, columns = parameter.shape[-2:]
                scale = {
                    "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5,
                    "original": max(1.0, rows / columns) ** 0.5,
                }[settings.adjust]
                parameter *= 1 - group["lr"] * settings.weight_decay
                parameter -= group["lr"] * scale * update.view_as(parameter)

    def _orthogonal(self, whole: Tensor) -> Tensor:
        x = whole.clone() if whole.dtype == torch.float64 else whole.bfloat16()
        x = x.T if whole.shape[0] > whole.shape[1] else x
        x = x / max(float(x.norm()), self.settings.eps)
        for _ in range(self.settings.steps):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return x.T if whole.shape[0] > whole.shape[1] else x
