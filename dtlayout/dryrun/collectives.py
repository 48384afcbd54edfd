"""Which collectives were really issued: name, group, message size.

Both ways into torch.distributed are seen: the `c10d` operators (`dist.all_reduce`, FSDP2, pipeline sends) and the
functional ones (`_c10d_functional`, DTensor). The message size is that of nccl-tests: the larger of what goes
into the collective and what comes out of it on this rank, so that of an all-gather is the gathered tensor and that of a
reduce-scatter the tensor before it is scattered.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from dtlayout.measure.storages import each_tensor
from dtlayout.measure.work import COLLECTIVE_NAMESPACES

_NAMES = {
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "isend": "send",
    "irecv": "recv",
    "recv_any_source": "recv",
    "monitored_barrier": "barrier",
}
"""Operator, without its underscores, → collective; others keep the operator's name."""

_NO_COLLECTIVES = {"wait_tensor", "wrap_tensor_autograd", "check_for_nan", "mesh_get_process_group"}


@dataclass(frozen=True)
class Collective:
    """One call as this rank issued it."""

    name: str
    """all_gather, reduce_scatter, all_reduce, broadcast, all_to_all, send, recv, barrier, …"""
    group: str
    """The process group's name."""
    ranks: tuple[int, ...]
    """The group's global ranks; empty if they cannot be told."""
    nbytes: int
    """The larger of input and output; 0 for a barrier."""
    dtype: torch.dtype | None
    """Format of the first tensor; None for a barrier."""


def observe_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Collective | None:
    """What an operator on plain tensors sends; None if it is no collective."""
    if func.namespace not in COLLECTIVE_NAMESPACES:
        return None
    operator = func.name().split("::")[1].split(".")[0].strip("_")
    if operator in _NO_COLLECTIVES:
        return None
    names = (argument.name for argument in func._schema.arguments)
    return _describe(operator, dict(zip(names, args, strict=False)) | kwargs, result)


def _describe(operator: str, arguments: dict[str, Any], result: Any) -> Collective:
    name = _NAMES.get(operator, operator)
    group = _find_group(arguments)
    # c10d returns its outputs again: a maximum over arguments and result doesn't count them twice.
    messages = [list(each_tensor(value)) for value in [*arguments.values(), result]]
    first = next((tensor for message in messages for tensor in message), None)
    is_message = name != "barrier" and first is not None
    return Collective(
        name=name,
        group=group.group_name if group else "",
        ranks=tuple(dist.get_process_group_ranks(group)) if group else (),
        nbytes=max(map(_count_bytes, messages)) if is_message else 0,
        dtype=first.dtype if is_message and first is not None else None,
    )


def _count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _find_group(arguments: dict[str, Any]) -> dist.ProcessGroup | None:
    """The group among an operator's arguments: boxed for c10d, by name (or itself) for the functional ones."""
    group = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, str):
        return _resolve_process_group(cast(Any, group))
    group = getattr(group, "real_obj", group)  # under FakeTensorMode
    if isinstance(group, torch.ScriptObject):
        return dist.ProcessGroup.unbox(group)
    return group if isinstance(group, dist.ProcessGroup) else None
