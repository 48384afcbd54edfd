"""FSDP2's sums of weight gradients over microbatches, to which the weights' own matmuls add.

Below ZeRO-2 FSDP2 keeps each weight's whole gradient in the reduce format until the last backward. It looks for such a
sum before it looks for the gradient that autograd made, and does not ask who filled it.
"""

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from dtlayout.mesh.parts import local_part
from dtlayout.ops.linear import SplittableLinear
from dtlayout.ops.loss import Head
from dtlayout.ops.weight_sum import WeightSum, add_product
from dtlayout.plans.fsdp_records import list_parameters


class ParameterSum:
    """The sum of a parameter's gradients, in FSDP2's record of the parameter."""

    def __init__(self, parameter: FSDPParam):
        self._parameter = parameter

    @torch.no_grad()
    def add(self, gradient_TN: Tensor, x_TD: Tensor) -> None:
        """Add a microbatch's gradient [N, D] to the sum; the first one begins it."""
        total = self._parameter.unsharded_accumulated_grad
        if begins := total is None:
            self._parameter.unsharded_accumulated_grad = total = self._make(gradient_TN)
        add_product(local_part(total), gradient_TN.t(), x_TD, begins=begins)

    def _make(self, gradient: Tensor) -> Tensor:
        """Memory for a sum, placed as the parameter is."""
        parameter = self._parameter
        whole = parameter.unsharded_param
        made = torch.empty_like(local_part(whole), dtype=parameter.reduce_dtype or gradient.dtype, requires_grad=False)
        return DTensor(made, whole._spec, requires_grad=False) if isinstance(whole, DTensor) else made


def add_in_matmuls(units: Iterable[FSDPModule], layers: Collection[nn.Module]) -> None:
    """Have linear layers add to FSDP2's sums of their weights' gradients, which are whole until the last backward."""
    for layer, parameter in _list_weights(units):
        if layer not in layers:
            continue
        multiply = WeightSum(ParameterSum(parameter)).multiply
        if isinstance(layer, Head):
            layer.product = multiply
            continue
        if type(layer) is nn.Linear:
            layer.__class__ = SplittableLinear
        assert isinstance(layer, SplittableLinear) and layer.multiply is F.linear, "a plain matmul has such a sum"
        layer.multiply = multiply


def _list_weights(units: Iterable[FSDPModule]) -> Iterator[tuple[nn.Module, FSDPParam]]:
    """Each module that has a sharded weight, which several share where it is tied."""
    for unit in units:
        for parameter in list_parameters(unit):
            info = parameter._module_info
            names = [info.param_name, *info.shared_param_names]
            for layer, name in zip([info.module, *info.shared_modules], names, strict=True):
                if name == "weight":
                    yield layer, parameter
