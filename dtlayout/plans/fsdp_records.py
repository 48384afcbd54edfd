"""FSDP2's own records: what it keeps of the parameters that a unit shards."""

from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def find_group(unit: FSDPModule) -> FSDPParamGroup | None:
    """The record of the parameters that a unit gathers together; None for a unit without any of its own."""
    group: FSDPParamGroup | None = fully_shard.state(unit)._fsdp_param_group  # type: ignore[attr-defined]
    return group


def list_parameters(unit: FSDPModule) -> list[FSDPParam]:
    """The record of each parameter that a unit gathers; an empty list for a unit without any of its own."""
    group = find_group(unit)
    return [] if group is None else group.fsdp_params
