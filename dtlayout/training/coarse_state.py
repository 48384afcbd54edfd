"""Optimizers of torch whose state lies in a coarser format than the parameters.

[Note: where a moment is rounded]
An update computes in the parameters' format. Each moment is read in its own format and rounded to it once, when the
update is done. On a GPU torch's fused AdamW does so in its one kernel, with fp32 parameters and bf16 moments. On a CPU
that kernel takes one format alone. There a chunk of both moments is converted at a time, so that the copies are small,
and of a size that stays in a processor's caches. torch's foreach SGD rounds its momentum twice: when it is scaled, and
when the gradient is added to it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dtlayout.mesh.parts import local_part

_CHUNK = 1 << 20
"""Elements whose moments are converted at a time: enough of them for all threads of a host."""


class CoarseAdamW(torch.optim.Optimizer):
    """torch's fused AdamW, with both moments in a format of their own: [Note: where a moment is rounded].

    Parameters and their gradients have one format and lie on one device.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        betas: tuple[float, float],
        eps: float,
        state_format: str,
        weight_decay: float = 0.0,
    ):
        """`params` are parameters or groups of them, as in torch; `state_format` is the name of one of its dtypes."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._state_dtype: torch.dtype = getattr(torch, state_format)
        self._step_supports_amp_scaling = True  # what GradScaler asks: `found_inf` may be set before a step

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient; none, and no moment, where `found_inf` on the device is 1.

        Gradients are divided by `grad_scale`, if there is one.
        """
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            states = [self._state_of(parameter) for parameter in parameters]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            values, slopes, exp_avgs, exp_avg_sqs = (
                [local_part(each) for each in tensors]
                for tensors in (
                    parameters,
                    [parameter.grad for parameter in parameters],
                    *([state[kind] for state in states] for kind in ("exp_avg", "exp_avg_sq")),
                )
            )
            settings: dict[str, Any] = {
                "lr": group["lr"], "beta1": group["betas"][0], "beta2": group["betas"][1], "eps": group["eps"],
                "weight_decay": group["weight_decay"], "amsgrad": False, "maximize": False, "found_inf": found_inf,
                "grad_scale": getattr(self, "grad_scale", None),
            }  # fmt: skip
            if _takes_all_formats(values[0]):
                torch._fused_adamw_(values, slopes, exp_avgs, exp_avg_sqs, [], steps, **settings)
            else:
                for each in zip(values, slopes, exp_avgs, exp_avg_sqs, steps, strict=True):
                    _update_in_chunks(*each, settings)
            if found_inf is not None:
                torch._foreach_sub_(steps, [found_inf] * len(steps))

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """A parameter's state, made where there is none."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind] = torch.zeros_like(parameter, dtype=self._state_dtype)
        return state


def _takes_all_formats(parameter: Tensor) -> bool:
    """Whether the fused kernel takes moments in another format than this parameter; a dry run's tensors stand for a
    GPU's."""
    return isinstance(parameter, FakeTensor) or (parameter.is_cuda and parameter.dtype == torch.float32)


def _update_in_chunks(
    parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, settings: dict[str, Any]
) -> None:
    """Update a parameter in place, with a chunk of the moments at a time in the parameter's format."""
    flat = parameter.view(-1), gradient.contiguous().view(-1), exp_avg.view(-1), exp_avg_sq.view(-1)
    for values, slopes, *kept in zip(*(each.split(_CHUNK) for each in flat), strict=True):
        if not values.numel():  # a rank may have no part of a small weight
            continue
        moments = exp_avg_chunk, exp_avg_sq_chunk = [each.to(values.dtype) for each in kept]
        torch._fused_adamw_([values], [slopes], [exp_avg_chunk], [exp_avg_sq_chunk], [], [step], **settings)
        for mine, moment in zip(kept, moments, strict=True):
            mine.copy_(moment)


class CoarseSGD(torch.optim.SGD):
    """torch's SGD, with the momentum in a format of its own: [Note: where a moment is rounded]."""

    def __init__(self, params: Iterable[Any], lr: float, *, momentum: float, foreach: bool, state_format: str):
        """`params` are parameters or groups of them, as in torch; `state_format` is the name of one of its dtypes."""
        super().__init__(params, lr=lr, momentum=momentum, foreach=foreach)
        self._state_dtype: torch.dtype = getattr(torch, state_format)
        self.register_step_pre_hook(_make_momentum)


def _make_momentum(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Make the momentum of each parameter that has a gradient, where torch would copy that in the gradient's format.

    From zeros the first step comes to the same.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.grad is not None and not optimizer.state[parameter]:
                zeros = torch.zeros_like(parameter, dtype=optimizer._state_dtype)  # type: ignore[attr-defined]
                optimizer.state[parameter]["momentum_buffer"] = zeros
