"""An embedding, a norm and a matmul with their sequence sharded over tp, beside the same on one process."""

import sys
from copy import deepcopy
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from dtlayout.ops.norm import RMSNorm
from dtlayout.plans.styles import STYLES


class _LigerRMSNormFunction(torch.autograd.Function):
    """liger-kernel's signature; like a Triton kernel it reads memory, which only a plain tensor has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, mode: str, in_place: bool) -> Tensor:
        assert (offset, mode, in_place) == (0.0, "llama", False)
        _check_memory(x, weight)
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x * scale, scale, weight)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        normal, scale, weight = ctx.saved_tensors
        _check_memory(gradient)
        g = gradient * weight
        dx = scale * (g - normal * (g * normal).mean(-1, keepdim=True))
        return dx, (gradient * normal).sum((0, 1)), None, None, None, None


def _check_memory(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.data_ptr(), f"a {type(tensor).__name__} has no memory of its own"


TORCH = "torch"
"""In place of a kernel: a norm that is none of ours."""


def find_differences(kernel: str) -> dict[str, float]:
    """‖ours - theirs‖ / ‖theirs‖ of the output and each gradient; for liger a stand-in of its package."""
    module = ModuleType("liger_kernel.ops.rms_norm")
    module.LigerRMSNormFunction = _LigerRMSNormFunction  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    try:
        return _compare(kernel)
    finally:
        del sys.modules[module.__name__]


def _compare(kernel: str) -> dict[str, float]:
    torch.manual_seed(0)
    layers = {
        "embed": nn.Embedding(20, 8),
        "norm": nn.RMSNorm(8, eps=1e-3) if kernel == TORCH else RMSNorm(8, 1e-3, kernel, torch.float64),
        "matmul": nn.Linear(8, 12, bias=False),
    }
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer.double())
    model.norm.weight.data.uniform_(0.5, 2.0)
    reference = deepcopy(model)
    reference.norm = RMSNorm(8, 1e-3, "eager", torch.float64)
    reference.norm.weight.data = model.norm.weight.data.clone()
    tokens, weights = torch.randint(20, (2, 16)), torch.randn(2, 16, 12, dtype=torch.float64)

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    matmul = nn.Sequential(model.matmul)
    sharded = nn.Sequential(model.embed, model.norm, matmul)
    styles = {
        "0": STYLES["embedding-scatter"](),
        "1": STYLES["sequence"](),
        "2": STYLES["input-gather"](),
        "2.0": STYLES["colwise"](),
    }
    parallelize_module(sharded, mesh, styles)
    columns = slice(12 // mesh.size() * mesh.get_local_rank(), 12 // mesh.size() * (mesh.get_local_rank() + 1))
    got, expected = sharded(tokens), reference(tokens)
    (got * weights[..., columns]).sum().backward()
    (expected * weights).sum().backward()
    differences = {"output": _distance(got, expected[..., columns])}
    for (name, ours), theirs in zip(sharded.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        differences[name] = _distance(ours.grad.full_tensor(), theirs.grad)
    return differences


def _distance(ours: Tensor, theirs: Tensor | None) -> float:
    assert theirs is not None
    return float((ours - theirs).norm() / theirs.norm())
