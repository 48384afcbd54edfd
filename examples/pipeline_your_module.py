"""Your module in a 1F1B pipeline of 2 stages, each with ZeRO-3 on 2 ranks: losses and gradient norms of one process.

torchrun --nproc-per-node 4 examples/pipeline_your_module.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dtlayout as dl


def build_model() -> nn.Sequential:
    torch.manual_seed(0)  # the same weights on every rank
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(32, 1)).double()


def measure(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().sum() / 16  # by all rows: losses of microbatches and ranks add up


mesh = dl.build_mesh(layout := dl.Layout(pp=2, dp_shard=2, micro_batch=2), "cpu")
formats = dl.Precision(params="float64", compute="float64", reduce="float64")
plan = dl.Plan({}, "*", (("*",),), 3, formats)  # no tensor parallelism; each layer gathers alone
model, x, y = build_model(), torch.randn(16, 32).double(), torch.randn(16, 1).double()
runtime = dl.pipeline(model, layout, mesh, x[:2], global_batch=16, plan=plan, loss=measure)
alone, place = build_model(), mesh["dp_shard"].get_local_rank()
optimizer, other = (torch.optim.AdamW(parameters, lr=1e-2) for parameters in (runtime.parameters, alone.parameters()))
for _ in range(5):
    step = dl.train_step(runtime, optimizer, x.chunk(2)[place], targets=y.chunk(2)[place])
    (loss := measure(alone(x), y)).backward()
    norm = nn.utils.clip_grad_norm_(alone.parameters(), torch.inf)
    torch.testing.assert_close((step.loss, step.grad_norm), (loss.item(), norm.item()))
    other.step()
    other.zero_grad()
if dist.get_rank() == 0:
    print(f"{runtime.schedule}\n5 losses and gradient norms as on one process, the last {step.loss:.4f}")
dist.destroy_process_group()
