"""Stand-ins for CUDA's operators: a dry run runs the CPU's operators, and these keep the memory that CUDA's keep.

[Note: operators that stand in for CUDA's]
A dry run's tensors say that they lie on the CPU, since fake ones cannot be put on a device that torch does not see. On
the CPU an RMSNorm consists of several operators, and each flash backend but one is refused. Two stand-ins replace them.
The CPU's flash attention keeps the same tensors (q, k, v, the output and one fp32 number a row). A norm of our own
keeps its input and one number a row, as CUDA's kernels do.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtlayout.dryrun.choose import has_stand_in
from dtlayout.measure.storages import any_wraps
from dtlayout.spec.kernel_records import AttentionKernel, Kernel, NormKernel
from dtlayout.spec.kernel_table import list_kernels


def list_stand_ins(device_type: str) -> list[Kernel]:
    """Kernels that run in place of the kernels of the same names: [Note: operators that stand in for CUDA's]."""
    if device_type == "cpu":
        return []
    flash = [kernel for kernel in list_kernels(AttentionKernel) if has_stand_in(kernel)]
    norms = [kernel for kernel in list_kernels(NormKernel) if device_type not in kernel.separate]
    return [
        *(replace(kernel, backend="FLASH_ATTENTION", function="") for kernel in flash),
        *(replace(kernel, function=_OneKernelNorm.apply) for kernel in norms),
    ]


class _OneKernelNorm(torch.autograd.Function):
    """RMSNorm with the memory and the traffic of one kernel; nobody looks at its numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=exact))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, _ = ctx.saved_tensors
        return x * upstream[0], torch.empty_like(weight), None


class GlooCopies(TorchDispatchMode):
    """Copies the input of each reduce-scatter, as gloo does and the fake group does not. Enter it after counters."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any_wraps(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and "reduce_scatter" in func.name():
            args[1].clone()
        return result
