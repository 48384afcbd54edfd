"""Context parallelism on a module of yours: 4 ranks share each sequence, and each way gives what one process computes.

torchrun --nproc-per-node 4 examples/long_context_on_your_module.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dtlayout as dl


def rotate(x: Tensor, positions: Tensor) -> Tensor:  # [B, heads, S, 8]; positions are those of this rank's tokens
    angles = positions[:, None] * 10.0 ** -torch.arange(4, dtype=torch.float64)
    (a, b), cos, sin = x.chunk(2, -1), angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [B, heads, S, width]
        return dl.causal_attention(q, k, v, "sdpa-math")

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # [B, S, 32]
        q, k, v = (each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return x + self.attend(rotate(q, positions), rotate(k, positions), v).transpose(1, 2).flatten(2)


def run(x: Tensor, positions: Tensor, method: str = "") -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.ModuleList([first := Attention(), Attention()]).double()
    if method:
        dl.apply_context(model, {"*.attend": method}, "sdpa-math", mesh["cp"])
    for block in model:
        x = block(x, positions)
    return x.detach(), torch.autograd.grad(x.square().sum(), first.qkv.weight)[0]


mesh, x = dl.build_mesh(dl.Layout(cp=4), "cpu"), torch.randn(2, 64, 32, generator=torch.manual_seed(1)).double()
expected, gradient = run(x, torch.arange(64))
for name in ("ring", "gather", "all-to-all"):
    layout = dl.Layout(cp=4, cp_method=name)
    own = torch.tensor([i for part in dl.own_positions(dist.get_rank(), layout, 64) for i in part])
    out, own_gradient = run(x[:, own], own, name)
    dist.all_reduce(own_gradient)  # each rank knows the terms of its own tokens
    torch.testing.assert_close((out, own_gradient), (expected[:, own], gradient))
if dist.get_rank() == 0:
    print(f"each of 4 ranks has {len(own)} of 64 tokens: ring, gather, all-to-all as on one")
dist.destroy_process_group()
