"""A quantized base: codes and scales in the place of frozen weights, split over tp as the weights were.

FSDP2 shards and gathers the two as they are. `named_weights` gives whoever fills a model's weights one name for each,
whatever its format.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.torch_version import TorchVersion

from dtlayout.base.errors import InvalidConfig
from dtlayout.mesh.parts import local_part
from dtlayout.ops.linear import SplittableLinear
from dtlayout.ops.quantized import QuantizedRows, multiply_quantized
from dtlayout.plans.plan import match_names
from dtlayout.plans.styles import local
from dtlayout.spec.base_format import BASE_FORMATS, SCALE, BaseFormat

_FIRST_TORCH = TorchVersion("2.12")
"""The first whose FSDP2 takes parameters of whole numbers (pytorch issue 177844)."""


class QuantizedWeight(NamedTuple):
    """The two parameters of a frozen weight [N, D], plain or DTensors."""

    codes: Tensor
    """Codes [N, bytes of a row]."""
    scales: Tensor
    """Scales [N, blocks of a row]."""
    format: BaseFormat

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight that they stand for."""
        return torch.Size((self.codes.shape[0], self.codes.shape[1] * 8 // self.format.bits))

    def find_place(self) -> tuple[QuantizedRows, tuple[int, ...]]:
        """This rank's part of the weight, and where in the whole it begins."""
        offset = (0, 0)
        if isinstance(self.codes, DTensor):
            mesh, placements = self.codes.device_mesh, self.codes.placements
            _, (row, byte) = compute_local_shape_and_global_offset(self.codes.shape, mesh, placements)
            offset = (row, byte * 8 // self.format.bits)
        codes, scales = (each.to_local() if isinstance(each, DTensor) else each for each in (self.codes, self.scales))
        return QuantizedRows(codes, scales, self.format), offset


def quantize_linears(module: nn.Module, patterns: Sequence[str], name: str) -> None:
    """Replace the weights of the linear layers that these patterns name by parameters for codes and scales of a format.

    Weights are frozen, on the meta device or to be filled later: no value is quantized here. InvalidConfig on a torch
    whose FSDP2 shards numbers alone.
    """
    if torch.__version__ < _FIRST_TORCH:
        raise InvalidConfig(
            f"precision.base={name} needs torch {_FIRST_TORCH}: FSDP2 of {torch.__version__} shards no codes"
        )
    base_format, names = BASE_FORMATS[name], [name for name, _ in module.named_modules()]
    for linear in (module.get_submodule(each) for pattern in patterns for each in match_names(pattern, names)):
        if type(linear) is nn.Linear:
            linear.__class__ = SplittableLinear
        assert isinstance(linear, SplittableLinear) and not linear.weight.requires_grad, "frozen linear layers alone"
        weight = linear.weight
        columns = local_part(weight).shape[1]
        codes = _make_like(weight, base_format.code_columns(columns), torch.uint8)
        scales = _make_like(weight, base_format.scale_columns(columns), weight.dtype)
        linear.weight = nn.Parameter(codes, requires_grad=False)
        linear.register_parameter(f"weight{SCALE}", nn.Parameter(scales, requires_grad=False))
        linear.base_format = name
        linear.multiply = partial(_multiply, linear)


def _make_like(weight: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """An empty matrix with the rows of this rank's part of a weight, placed like the weight."""
    if not isinstance(weight, DTensor):
        return torch.empty(weight.shape[0], columns, dtype=dtype, device=weight.device)
    own = weight.to_local()
    made = torch.empty(own.shape[0], columns, dtype=dtype, device=own.device)
    return DTensor.from_local(made, weight.device_mesh, weight.placements, run_check=False)


def _multiply(linear: SplittableLinear, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    scales = linear.get_parameter(f"weight{SCALE}")
    own = local(scales) if isinstance(scales, DTensor) else scales
    return multiply_quantized(x, weight, own, bias, linear.base_format)


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor | QuantizedWeight]]:
    """Name and parameter of each weight of a module; of a quantized one its two parameters, by the weight's name."""
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        if (scales := parameters.get(f"{name}{SCALE}")) is not None:
            linear = module.get_submodule(name.rpartition(".")[0])
            assert isinstance(linear, SplittableLinear), "nothing else has scales"
            yield name, QuantizedWeight(parameter, scales, BASE_FORMATS[linear.base_format])
        elif not name.endswith(SCALE):
            yield name, parameter
