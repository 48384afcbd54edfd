"""Two stages of your own in a 1F1B pipeline over 2 ranks, with the gradients of one process.

torchrun --nproc-per-node 2 examples/pipeline_your_module.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtlayout import Batch, Boundary, Layout, build_mesh, build_runtime, make_schedule

ROWS, WIDTH = 8, 16


class Head(nn.Module):
    """A last stage takes what `step` gets by keyword, and gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, *, targets: Tensor) -> Tensor:
        return (self.out(x) - targets).square().sum() / ROWS  # the losses of the microbatches add up


torch.manual_seed(0)  # the same weights and rows on every rank
stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), Head()]
x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)

layout = Layout(pp=2, micro_batch=2)
mesh = build_mesh(layout, "cpu")
rank = mesh["pp"].get_local_rank()
schedule = make_schedule(layout, Batch(global_batch=ROWS, seq_len=1))
boundary = Boundary(shape=(layout.micro_batch, WIDTH), dtype=torch.float32)
runtime = build_runtime([stages[rank]], schedule, [], mesh, boundary)
loss = runtime.step(x, targets=y)
gradients = [p.grad.clone() for p in stages[rank].parameters()]

stages[rank].zero_grad()
alone = stages[1](stages[0](x), targets=y)
alone.backward()
torch.testing.assert_close(gradients, [p.grad for p in stages[rank].parameters()])
if loss is not None:  # only the last stage knows it
    torch.testing.assert_close(loss, alone.detach())
    print(f"{schedule}\nloss {loss:.4f} and gradients as on one process")
dist.destroy_process_group()
