"""FSDP2 gathers weights in fp8, where they multiply with one scale for a whole weight.

Masters, their gradients and the optimizer's state stay as they are: a rank casts its shard to the compute format, and
from there to e4m3, when the shard is gathered. Bytes travel, since gloo has no fp8. Gathered weights lie there in fp8
and multiply as they are, each cast once for a gather. The numbers are the bits of what is gathered in the compute
format and cast after that, since the scale is that of the largest magnitude of all ranks' shards, tp's parts too.

Scales are found once a step, before the first gather: one all-reduce over the ranks that share the shards, and one over
tp, of a number for each weight.

FSDP2 asks a shard for an extension (`fsdp_pre_all_gather`), by which it is gathered in another form. A shard of a class
of its own would come to the optimizer and to checkpoints, and whatever makes parameters anew would lose it. So
FSDP2's record of the parameter names the extension.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from dtlayout.ops.cast_weight import CastWeight
from dtlayout.ops.scaled import E4M3, cast, find_scales
from dtlayout.plans.fsdp_records import list_parameters


class CastGathers:
    """The weights of a sharded module that are gathered in fp8, and their scales."""

    def __init__(
        self, parameters: Sequence["_CastParameter"], groups: Sequence[dist.ProcessGroup], compute: torch.dtype
    ):
        """`groups` have the ranks that share a weight, `compute` is the format before the cast."""
        self._parameters, self._compute = parameters, compute
        self._groups = [group for group in groups if group.size() > 1]
        self.are_stale = True
        """True if weights may have changed since their scales were found."""

    @torch.no_grad()
    def find_scales(self) -> None:
        """Find the scales, if weights may have changed since; call it on all ranks before weights are gathered."""
        if not self.are_stale:
            return
        shards = [each._sharded_param_data for each in self._parameters]
        # Rounding keeps the order of numbers, so the largest one is the largest of what is rounded.
        largest = torch.stack(torch._foreach_norm(shards, torch.inf)).to(self._compute).float()
        largest = largest.to(self._parameters[0].device)
        for group in self._groups:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        for each, scale in zip(self._parameters, find_scales(largest, E4M3), strict=True):
            each.extension.set_scale(scale)
        self.are_stale = False


def gather_cast(
    module: nn.Module, names: Collection[str], groups: Sequence[dist.ProcessGroup], compute: torch.dtype
) -> CastGathers | None:
    """Have FSDP2 gather the weights of these linear layers in fp8, after `fully_shard`; None where there are none.

    `groups` have the ranks that share the shards, and tp's. The result's `find_scales` runs before each forward.
    """
    found = list[_CastParameter]()
    layers = {module.get_submodule(name) for name in names}
    for unit in (part for part in module.modules() if isinstance(part, FSDPModule)):
        for parameter in list_parameters(unit):
            info = parameter._module_info
            if info.module in layers and info.param_name == "weight":
                parameter.__class__ = _CastParameter
                assert isinstance(parameter, _CastParameter)
                parameter.extension = _Extension(parameter, compute)
                parameter._init_extensions()
                found.append(parameter)
    if not found:
        return None
    gathers = CastGathers(found, groups, compute)
    find = torch.compiler.disable(gathers.find_scales)
    module.register_forward_pre_hook(lambda *_: find(), prepend=True)  # before FSDP2's own
    return gathers


class _CastParameter(FSDPParam):
    """FSDP2's record of a parameter that is gathered by an extension."""

    extension: "_Extension"

    @property
    def _sharded_local_tensor(self) -> Any:
        return self.extension


class _Extension:
    """FSDP2 asks it how a shard is gathered, as it would ask the shard's tensor."""

    def __init__(self, parameter: FSDPParam, compute: torch.dtype):
        self._parameter, self._compute = parameter, compute
        self._scale: Tensor | None = None

    def set_scale(self, scale: Tensor) -> None:
        """Take the weight's scale; gathered weights keep the tensor of the first one."""
        if self._scale is None:
            self._scale = scale.clone()
        else:
            self._scale.copy_(scale)

    def size(self) -> torch.Size:
        """Size of the shard with its padding."""
        return self._parameter.padded_sharded_param_size

    def to(self, device: torch.device, non_blocking: bool = False) -> "_Extension":
        """Itself: the shard is copied to the device when it is cast."""
        return self

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, size: torch.Size, stride: tuple[int, ...], module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """Bytes of this rank's shard in e4m3."""
        assert self._scale is not None, "scales are found before weights are gathered"
        shard = self._parameter._sharded_param_data.to(self._parameter.device, non_blocking=True)
        values = cast(shard.to(self._compute), self._scale, E4M3).values
        return (values.view(torch.uint8).view(self.size()),), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The gathered weight; one that is there already, `out`, has its numbers in the memory that was gathered."""
        if out is not None:
            return None
        assert self._scale is not None
        return CastWeight(outputs[0].view(E4M3), self._scale, self._compute), ()
