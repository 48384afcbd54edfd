"""A plan by hand for a module of yours: tensor parallelism and FSDP2 over 4 ranks, with the losses of one process.

torchrun --nproc-per-node 4 examples/plan_on_your_module.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtlayout import Layout, Plan, Precision, Recompute, apply_plan, build_mesh


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.widen(x).relu())


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(Residual(), Residual(), Residual()), nn.Linear(16, 1)).double()


def train(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(5):
        loss = (model(x) - y).square().sum() / 8  # by the rows of all ranks, since gradients are summed over them
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


plan = Plan(
    tensor={"0.*.widen": "colwise", "0.*.narrow": "rowwise"},  # `*` is one part of a name: 0.0.widen, 0.1.widen, …
    blocks="0.*",
    recompute=Recompute.parse("every-2"),
    units=(("0.*",),),  # each block gathers its parameters alone; the rest belongs to the root
    zero=3,
    precision=Precision(params="float64", compute="float64", reduce="float64"),
)
mesh = build_mesh(Layout(dp_shard=2, tp=2), "cpu")
model = build_model()
apply_plan(model, plan, mesh)  # with several microbatches, its result says before each backward which one is the last
x, y = torch.randn(8, 16, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)  # as seeded by build_model
place = mesh["dp_shard"].get_local_rank()
losses = train(model, x.chunk(2)[place], y.chunk(2)[place])
for loss in losses:
    dist.all_reduce(loss, group=mesh["dp_shard"].get_group())
torch.testing.assert_close(losses, train(build_model(), x, y))
if dist.get_rank() == 0:
    print(f"{plan}\nlosses of 4 ranks as on one: " + " ".join(f"{loss:.4f}" for loss in losses))
dist.destroy_process_group()
