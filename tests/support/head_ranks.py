"""A head with bias, factor and softcap split over tp, beside the same on one process."""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from dtlayout.ops.loss import Head
from dtlayout.plans.styles import STYLES


def find_differences(kernel: str) -> dict[str, float]:
    """Largest difference of the loss and of each gradient, of hidden states, weight and bias."""
    torch.manual_seed(0)
    world_size = dist.get_world_size()
    head = Head(6, 4 * world_size, kernel, torch.float64, bias=True, factor=0.5, softcap=3.0)
    torch.nn.init.normal_(head.weight)
    torch.nn.init.normal_(head.bias)
    hidden = torch.randn(2, 5, 6, dtype=torch.float64)
    targets = torch.randint(4 * world_size, (2, 5))
    split = parallelize_module(deepcopy(head), init_device_mesh("cpu", (world_size,)), STYLES["head"]())
    results = []
    for each in (head, split):
        h = hidden.clone().requires_grad_()
        loss = each(h, targets, 7.0)
        loss.backward()
        gradients = {name: p.grad for name, p in each.named_parameters()}
        whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items()}
        results.append({"loss": loss.detach(), "hidden": h.grad, **whole})
    own, theirs = results
    return {name: float((own[name] - theirs[name]).abs().max()) for name in own}
