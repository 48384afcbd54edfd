"""Attention of one's own with norms of heads and frozen parameters, split by a plan, beside the same on one process."""

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from dtlayout.base.errors import InvalidConfig
from dtlayout.mesh.build import build_mesh
from dtlayout.plans.apply import apply_plan
from dtlayout.plans.plan import Plan
from dtlayout.spec.layout import Layout
from dtlayout.spec.precision import Precision

STYLES = {"*.q": "colwise", "*.k": "colwise", "*.v": "colwise", "*.o": "rowwise"}
NORMS = {"*.q_norm": "head-norm", "*.k_norm": "head-norm"}
SCALE = {"*.scale": "whole"}


class Attention(nn.Module):
    """8 heads of width 4, and a norm of the sum that every rank computes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(4), nn.RMSNorm(4)
        self.scale = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.scale(x + self.o(out.transpose(1, 2).flatten(2)))


def find_differences(styles: dict[str, str], frozen: tuple[str, ...]) -> dict[str, float] | str:
    """Largest difference of each gradient on dp2 · tp2, or why the plan is refused.

    Parameters whose names end as `frozen` says have requires_grad=False before the plan, which does not name them.
    """
    torch.manual_seed(0)
    alone = nn.Sequential(Attention(), Attention()).double()
    for parameter in alone.parameters():
        nn.init.normal_(parameter, std=0.5)
    for name, parameter in alone.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen))
    x, weights = torch.randn(4, 6, 32).double(), torch.randn(4, 6, 32).double()
    model, mesh = deepcopy(alone), build_mesh(Layout(dp_shard=2, tp=2), "cpu")
    formats = Precision(params="float64", compute="float64", reduce="float64")
    try:
        apply_plan(model, Plan(styles, "*", (("*",),), 3, formats), mesh)  # type: ignore[arg-type]
    except InvalidConfig as error:
        return str(error)
    place = mesh["dp_shard"].get_local_rank()
    (model(x.chunk(2)[place]) * weights.chunk(2)[place]).sum().backward()
    (alone(x) * weights).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    expected = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    whole = {name: each.full_tensor() for name, each in found.items() if isinstance(each, DTensor)}
    return {name: float((whole[name] - expected[name]).abs().max()) for name in expected}
