"""Measurements of single ranks (matmuls, attention, elementwise kernels, the host's time), and of collectives."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from dtlayout.base.errors import KernelError
from dtlayout.calibrate.clock import time_alone, time_together
from dtlayout.calibrate.measured import AttentionTime, CollectiveTime, MatmulTime
from dtlayout.ops.attention import causal_attention
from dtlayout.spec.device import Device, usual_compute_format
from dtlayout.spec.kernel_records import AttentionKernel
from dtlayout.spec.kernel_table import list_kernels
from dtlayout.spec.model_shape import divisors
from dtlayout.spec.precision import Format

_TOKENS = {"cpu": (64, 256, 1024), "cuda": (512, 2048, 8192)}
_WIDTHS = {
    "cpu": ((128, 128), (384, 128), (512, 512), (1536, 512)),
    "cuda": ((2048, 2048), (4096, 4096), (14336, 4096), (4096, 14336)),
}
"""n and k of each matmul."""
_ATTENTION = {"cpu": ((2, 4, 128, 32), (1, 2, 2048, 64)), "cuda": ((1, 32, 2048, 128), (1, 32, 8192, 128))}
"""Batch, heads, length and head width of each attention."""
_STREAMED_BYTES = {"cpu": 2**26, "cuda": 2**30}
_SMALL_OPERATIONS = 200
_COLLECTIVE_BYTES = {"cpu": (2**12, 2**16, 2**20, 2**22), "cuda": (2**16, 2**20, 2**24, 2**28)}
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def list_formats(device: Device) -> tuple[Format, ...]:
    """Formats in which matmuls are timed on a device, the one that steps are timed in first."""
    return ("float32", "bfloat16") if device.type == "cpu" else (usual_compute_format(device),)


def measure_matmuls(device: Device) -> Iterator[MatmulTime]:
    """Time matmuls by shape and format."""
    device_type = device.type
    for name, m, (n, k) in product(list_formats(device), _TOKENS[device_type], _WIDTHS[device_type]):
        a = torch.randn(m, k, device=device_type, dtype=getattr(torch, name))
        b = torch.randn(k, n, device=device_type, dtype=getattr(torch, name))
        multiply = partial(torch.matmul, a, b)
        seconds, alone_s = time_together(multiply, device_type), time_alone(multiply, device_type)
        yield MatmulTime(m=m, n=n, k=k, format=name, seconds=seconds, alone_s=alone_s)


def measure_attention(device: Device) -> Iterator[AttentionTime]:
    """Time attention by kernel and length, forward and backward: those of torch's that hold no scores and run here."""
    device_type, name = device.type, list_formats(device)[0]
    own = [kernel for kernel in list_kernels(AttentionKernel) if kernel.backend and not kernel.package]
    kernels = [kernel.name for kernel in own if name in kernel.formats(device_type) and not kernel.holds_scores]
    for kernel, (batch, heads, seq_len, head_dim) in product(kernels, _ATTENTION[device_type]):
        shape = batch, heads, seq_len, head_dim
        q, k, v = (
            torch.randn(shape, device=device_type, dtype=getattr(torch, name), requires_grad=True) for _ in range(3)
        )
        attend = partial(causal_attention, q, k, v, kernel)
        try:
            attend()
        except KernelError:  # not on this GPU, and on none of the others either
            continue
        forward_s = time_together(attend, device_type)
        both_s = time_together(partial(_attend_and_back, attend, (q, k, v)), device_type)
        yield AttentionTime(
            kernel=kernel, batch=batch, heads=heads, seq_len=seq_len, head_dim=head_dim, format=name,
            forward_s=forward_s, backward_s=max(0.0, both_s - forward_s),
        )  # fmt: skip


def _attend_and_back(attend: Callable[[], Tensor], inputs: Sequence[Tensor]) -> None:
    torch.autograd.grad(attend().sum(), inputs)


def measure_stream(device_type: str) -> float:
    """Bytes per second that an elementwise kernel reads and writes."""
    source = torch.randn(_STREAMED_BYTES[device_type] // 4, device=device_type)
    target = torch.empty_like(source)
    seconds = time_together(lambda: torch.add(source, 1.0, out=target), device_type)
    return 2 * _STREAMED_BYTES[device_type] / seconds


def measure_host(device_type: str) -> tuple[float, float]:
    """Seconds of many small operations with their gradients, for all ranks at once and for one alone."""
    x = torch.randn(8, 8, device=device_type, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(_SMALL_OPERATIONS):
            y = y * 1.0
        torch.autograd.grad(y.sum(), x)

    return time_together(chain, device_type), time_alone(chain, device_type)


def measure_collectives(device_type: str, ranks_per_node: int) -> Iterator[CollectiveTime]:
    """Time collectives of groups of neighbours, like tp's, and of groups of distant ranks, like data parallelism's."""
    world = dist.get_world_size()
    for num_ranks in divisors(world)[1:]:
        for stride in dict.fromkeys((1, world // num_ranks)):
            blocks = torch.arange(world).view(-1, num_ranks, stride)
            everyones = blocks.transpose(1, 2).reshape(-1, num_ranks).tolist()
            group, _ = dist.new_subgroups_by_enumeration(everyones)
            crosses = any(len({rank // ranks_per_node for rank in ranks}) > 1 for ranks in everyones)
            for size in _COLLECTIVE_BYTES[device_type]:
                for kind, action in _prepare(size, group, device_type).items():
                    yield CollectiveTime(
                        kind=kind, num_ranks=num_ranks, stride=stride, size_bytes=size, crosses_nodes=crosses,
                        seconds=time_together(action, device_type),
                    )  # fmt: skip
            dist.destroy_process_group(group)


def _prepare(size: int, group: dist.ProcessGroup, device_type: str) -> dict[str, Callable[[], object]]:
    """Kind of collective → function that runs one of `size` bytes.

    For messages, every second rank sends to the next one, which sends back.
    """
    ranks, place = dist.get_process_group_ranks(group), dist.get_rank(group)
    part = torch.zeros(max(1, size // 4 // len(ranks)), device=device_type)
    whole = torch.zeros(part.numel() * len(ranks), device=device_type)
    both = (dist.send, dist.recv) if place % 2 == 0 else (dist.recv, dist.send)
    messages = [partial(act, whole, ranks[place ^ 1], group=group) for act in both if place ^ 1 < len(ranks)]
    return {
        "all-reduce": partial(dist.all_reduce, whole, group=group),
        "all-gather": partial(_GATHER, whole, part, group=group),
        "reduce-scatter": partial(_SCATTER, part, whole, group=group),
        "message": lambda: [send_or_receive() for send_or_receive in messages],
    }
