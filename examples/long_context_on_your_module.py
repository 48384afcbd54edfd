"""Context parallelism on a module of yours: 4 ranks share each sequence, and each way gives what one process computes.

torchrun --nproc-per-node 4 examples/long_context_on_your_module.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dtlayout as dl
from dtlayout.ops.attention import causal_attention
from dtlayout.spec.context_parallel import CONTEXT_METHODS, own_parts


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:  # [B, heads, S, width]
        return causal_attention(q, k, v, "sdpa-math", mask)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, 32]
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return x + self.attend(q, k, v, None).transpose(1, 2).flatten(2)


def run(x: Tensor, method: str = "") -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention()).double()
    if method:
        dl.apply_context(model, {"*.attend": method}, "sdpa-math", mesh)
    (out := model(x)).square().sum().backward()
    return out.detach(), model[0].qkv.weight.grad


mesh = dl.build_mesh(dl.Layout(cp=4), "cpu")["cp"]
torch.manual_seed(1)
expected, gradient = run(x := torch.randn(2, 64, 32, dtype=torch.float64))
for name, method in CONTEXT_METHODS.items():
    own = [i for part in own_parts(method.order, 64, 4, mesh.get_local_rank()) for i in part]
    out, own_gradient = run(x[:, own], name)
    dist.all_reduce(own_gradient)  # each rank knows the terms of its own tokens
    torch.testing.assert_close((out, own_gradient), (expected[:, own], gradient))
if dist.get_rank() == 0:
    print(f"each of 4 ranks has {len(own)} of 64 tokens: " + ", ".join(CONTEXT_METHODS) + " as on one")
dist.destroy_process_group()
