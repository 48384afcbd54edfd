"""Collectives that a rank really issued: name, group, message size.

Both ways into torch.distributed are seen: the `c10d` operators (`dist.all_reduce`, FSDP2, pipeline sends) and the
functional ones (`_c10d_functional`, DTensor). The message size is defined as in nccl-tests: the larger of input and
output of the collective on this rank. For an all-gather that is the gathered tensor, for a reduce-scatter the tensor
before it is scattered.
"""

import re
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from dtlayout.measure.storages import each_tensor
from dtlayout.measure.work import COLLECTIVE_NAMESPACES, bind

_NAMES = {
    "all_gather": r"all_?gather.*",
    "reduce_scatter": r"reduce_scatter.*",
    "all_reduce": r"all_?reduce.*",
    "all_to_all": r".*all_?to_?all.*",
    "send": r"isend",
    "recv": r"i?recv.*",
    "barrier": r".*barrier",
}
"""Collective → pattern of its operators' names without underscores at the ends; others keep the operator's name."""
_NO_COLLECTIVES = {"wait_tensor", "wrap_tensor_autograd", "check_for_nan", "mesh_get_process_group"}


@dataclass(frozen=True)
class Collective:
    """One call of a collective, as this rank issued it."""

    name: str
    """all_gather, reduce_scatter, all_reduce, broadcast, all_to_all, send, recv, barrier, …"""
    ranks: tuple[int, ...]
    """Global ranks of the group; empty if they cannot be told."""
    nbytes: int
    """Bytes of the larger of input and output; 0 for a barrier."""


def observe_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Collective | None:
    """The collective that an operator on plain tensors issues; None if the operator is no collective."""
    operator = func.name().split("::")[1].split(".")[0].strip("_")
    if func.namespace not in COLLECTIVE_NAMESPACES or operator in _NO_COLLECTIVES:
        return None
    name = next((name for name, pattern in _NAMES.items() if re.fullmatch(pattern, operator)), operator)
    arguments = bind(func, args, kwargs)
    group = _find_group(arguments)
    # c10d returns its outputs again: a maximum over arguments and result doesn't count them twice.
    messages = [sum(tensor.nbytes for tensor in each_tensor(value)) for value in [*arguments.values(), result]]
    return Collective(
        name=name,
        ranks=tuple(dist.get_process_group_ranks(group)) if group else (),
        nbytes=0 if name == "barrier" else max(messages),
    )


def _find_group(arguments: dict[str, Any]) -> dist.ProcessGroup | None:
    """The group among an operator's arguments: boxed for c10d, by name (or itself) for the functional ones."""
    group = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, str):
        return _resolve_process_group(cast(Any, group))
    group = getattr(group, "real_obj", group)  # under FakeTensorMode
    if isinstance(group, torch.ScriptObject):
        return dist.ProcessGroup.unbox(group)
    return group if isinstance(group, dist.ProcessGroup) else None
