"""LoRA beside a frozen module of yours on dp2 · tp2: only the adapters have gradients, those of one process.

torchrun --nproc-per-node 4 examples/adapter_on_your_module.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import dtlayout as dl


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.widen(x).relu())


def build_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Residual(), Residual()).double()
    dl.add_adapters(model, dl.Adapter(rank=4, targets=("widen",)))
    nn.init.normal_(model.get_parameter("0.widen.lora_B.weight"))  # it is 0 at first, and then lora_A has no gradient
    return model


styles = {"*.widen": "colwise", "*.widen.lora_A": "replicated", "*.widen.lora_B": "colwise", "*.narrow": "rowwise"}
formats = dl.Precision(params="float64", compute="float64", reduce="float64")
plan = dl.Plan(styles, "*", (("*",),), 3, formats, frozen=("*.*.weight", "*.*.bias"))
mesh = dl.build_mesh(dl.Layout(dp_shard=2, tp=2), "cpu")
dl.apply_plan(model := build_model(), plan, mesh)
alone, x = build_model(), torch.randn(8, 16, dtype=torch.float64)
model(x.chunk(2)[mesh["dp_shard"].get_local_rank()]).square().sum().backward()
alone(x).square().sum().backward()
found = {name: p.grad.full_tensor() for name, p in model.named_parameters() if isinstance(p.grad, DTensor)}
torch.testing.assert_close(found, {name: p.grad for name, p in alone.named_parameters() if p.grad is not None})
print(f"rank {dist.get_rank()}: gradients of {', '.join(found)} as on one process\n", end="")
dist.destroy_process_group()
