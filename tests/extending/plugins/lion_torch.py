"""Lion in torch, imported where a run is built."""

import torch


class Lion(torch.optim.Optimizer):
    """As `extending.plugins.lion` describes it."""

    def __init__(self, groups, lr, lookahead, momentum_decay):
        super().__init__(groups, {"lr": lr, "lookahead": lookahead, "momentum_decay": momentum_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                gradient, momentum = parameter.grad, state["momentum"].to(parameter.dtype)
                update = (momentum * group["lookahead"] + gradient * (1 - group["lookahead"])).sign()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                kept = momentum * group["momentum_decay"] + gradient * (1 - group["momentum_decay"])
                state["momentum"].copy_(kept)
