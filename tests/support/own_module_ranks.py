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


class FusedAttention(nn.Module):
    """8 heads of width 4 with ALiBi; one matrix makes q, k and v, by head or in thirds."""

    rank = 0
    """This rank of tp, which has the heads from `rank * h` on, of its h."""

    def __init__(self, *, is_by_head: bool):
        super().__init__()
        self.qkv, self.o, self.is_by_head = nn.Linear(32, 96), nn.Linear(32, 32), is_by_head

    def forward(self, x: Tensor) -> Tensor:
        rows = self.qkv(x)
        by_head = rows.unflatten(-1, (-1, 3, 4)) if self.is_by_head else rows.unflatten(-1, (3, -1, 4)).transpose(2, 3)
        q, k, v = by_head.permute(3, 0, 2, 1, 4)
        heads, places = q.shape[1], torch.arange(x.shape[1])
        slopes = (2.0 ** -torch.arange(1, 9).double())[self.rank * heads :][:heads]
        past = (places[None] - places[:, None]).double()
        bias = (slopes[:, None, None] * past).masked_fill(past > 0, -torch.inf)
        return x + self.o(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))


FUSED = {"*.qkv": "colwise", "*.o": "rowwise"}


def find_fused_differences(is_by_head: bool) -> dict[str, float] | str:
    """Largest difference of each gradient of two `FusedAttention` on dp2 · tp2."""
    blocks = [FusedAttention(is_by_head=is_by_head) for _ in range(2)]
    return find_differences(FUSED, (), nn.Sequential(*blocks))


def find_differences(
    styles: dict[str, str], frozen: tuple[str, ...], alone: nn.Module | None = None
) -> dict[str, float] | str:
    """Largest difference of each gradient on dp2 · tp2, or why the plan is refused.

    Parameters whose names end as `frozen` says have requires_grad=False before the plan, which does not name them.
    The module is two blocks of `Attention` where none is given.
    """
    torch.manual_seed(0)
    alone = (alone or nn.Sequential(Attention(), Attention())).double()
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
    for block in model.children():
        block.rank = mesh["tp"].get_local_rank()  # type: ignore[assignment]
    place = mesh["dp_shard"].get_local_rank()
    (model(x.chunk(2)[place]) * weights.chunk(2)[place]).sum().backward()
    (alone(x) * weights).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    expected = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    whole = {name: each.full_tensor() for name, each in found.items() if isinstance(each, DTensor)}
    return {name: float((whole[name] - expected[name]).abs().max()) for name in expected}
