"""What operators hold on the device that is not there: a dry run computes nothing, but its operators are the CPU's.

[Note: operators that stand in for CUDA's]
A dry run's tensors say that they lie on the CPU, since fake ones cannot be put on a device that torch does not see.
There an RMSNorm is made of several operators and each flash backend but one is refused. In their place come the CPU's
flash attention, which keeps the same results (q, k, v, the output and one fp32 number a row), and a norm that keeps
its input and one number a row, as CUDA's kernels do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from dtlayout.kernels import FLASH_LIKE
from dtlayout.measure.storages import any_wraps
from dtlayout.ops.attention import BACKENDS
from dtlayout.ops.norm import NORMS

K = TypeVar("K")
V = TypeVar("V")


@contextmanager
def operators_of(device_type: str) -> Iterator[None]:
    """Inside, operators hold what they hold on a device; enter it after whatever counts."""
    if device_type == "cpu":
        with GlooCopies():
            yield
        return
    flash = {kernel: SDPBackend.FLASH_ATTENTION for kernel in BACKENDS if kernel in FLASH_LIKE}
    with _replaced(BACKENDS, flash), _replaced(NORMS, {"fused": one_kernel_norm}):
        yield


@contextmanager
def _replaced(table: dict[K, V], values: dict[K, V]) -> Iterator[None]:
    before = dict(table)
    table.update(values)
    try:
        yield
    finally:
        table.update(before)


def one_kernel_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[Note: operators that stand in for CUDA's]."""
    result: Tensor = _OneKernelNorm.apply(x, weight)
    return result


class _OneKernelNorm(torch.autograd.Function):
    """The memory and the traffic of an RMSNorm in one kernel; its numbers are never looked at."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=exact))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return x * upstream[0], torch.empty_like(weight)


class GlooCopies(TorchDispatchMode):
    """A reduce-scatter of gloo copies what goes into it; the fake group's does not."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any_wraps(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and "reduce_scatter" in func.name():
            sent = args[1]
            sent.clone()
        return result
