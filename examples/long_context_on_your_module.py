"""Context parallelism on a module of yours: 4 ranks share each sequence, and each way gives what one process computes.

torchrun --nproc-per-node 4 examples/long_context_on_your_module.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtlayout import Layout, build_mesh
from dtlayout.ops.attention import causal_attention
from dtlayout.plans.context import apply_context
from dtlayout.spec.context_parallel import CONTEXT_METHODS, own_parts

KERNEL = "sdpa-math"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:  # [B, heads, S, width]
        return causal_attention(q, k, v, KERNEL, mask)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, 32]
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return x + self.attend(q, k, v, None).transpose(1, 2).flatten(2)


def run(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    (out := model(x)).square().sum().backward()
    return out.detach(), model[0].qkv.weight.grad


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention()).double()


mesh = build_mesh(Layout(cp=4), "cpu")["cp"]
expected, gradient = run(build_model(), x := torch.randn(2, 64, 32, dtype=torch.float64))  # as seeded by build_model
for name, method in CONTEXT_METHODS.items():
    model = build_model()
    apply_context(model, {"*.attend": name}, KERNEL, mesh)
    own = [i for part in own_parts(method.order, 64, 4, mesh.get_local_rank()) for i in part]
    out, own_gradient = run(model, x[:, own])
    dist.all_reduce(own_gradient)  # each rank knows the terms of its own tokens
    torch.testing.assert_close((out, own_gradient), (expected[:, own], gradient))
if dist.get_rank() == 0:
    print(f"each of 4 ranks has {len(own)} of 64 tokens: " + ", ".join(CONTEXT_METHODS) + " as on one")
dist.destroy_process_group()
