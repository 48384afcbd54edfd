"""Initial weights that are the same in every layout: a function of (seed, parameter name, position) alone.

Described models have a rule here; a traced one has its family's own, read by `tracing/initial.py`. Each element's
normal deviate is computed from its position in the whole tensor, so a rank fills its shard without
seeing the rest. 64 random bits come from the SplitMix64 finaliser (Steele, Lea, Flood 2014,
doi:10.1145/2660193.2660195), the deviate from the inverse of the normal distribution.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dtlayout.models.families import find_weight
from dtlayout.models.feed_forward import Mixture
from dtlayout.models.traced import FAMILY
from dtlayout.models.weight import Piece
from dtlayout.models.weights import list_described
from dtlayout.ops.quantized import QuantizedRows
from dtlayout.plans.quantize import QuantizedWeight, named_weights
from dtlayout.spec.model_shape import ModelShape
from dtlayout.tracing.initial import InitialRule, find_rules

INIT_STD = 0.02
"""Standard deviation of every matrix, as in GPT-2 and Llama's published code."""
CHUNK = 1 << 20
"""Elements that are computed at a time, which bounds the temporary memory to some 50 MB."""


@runtime_checkable
class HasTables(Protocol):
    """A module with tables that are computed, not trained, such as rotary embeddings have."""

    def reset_buffers(self, device: torch.device | str | None = None) -> None:
        """Compute the tables on their device, or on another one, to which they go."""


def allocate(modules: Sequence[nn.Module], device: torch.device | str) -> None:
    """Give what of sharded modules is on the meta device its memory, and fill tables.

    Parameters hold what was there.
    """
    for module in modules:
        module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        for part in module.modules():
            if isinstance(part, HasTables):
                part.reset_buffers()


def move_tables(modules: Sequence[nn.Module], device: torch.device | str) -> None:
    """Tables, and biases of routers, of modules whose parameters lie on the host go where modules compute."""
    for part in (part for module in modules for part in module.modules()):
        if isinstance(part, HasTables):
            part.reset_buffers(device)
        if isinstance(part, Mixture) and part.correction_bias is not None:
            part.correction_bias.data = part.correction_bias.data.to(device)


def initialize(modules: Sequence[nn.Module], model: ModelShape, seed: int, device: torch.device | str) -> None:
    """`allocate`, and fill all parameters with their initial values."""
    allocate(modules, device)
    fill_initial((named for module in modules for named in named_weights(module)), model, seed)


def fill_initial(named: Iterable[tuple[str, Tensor | QuantizedWeight]], model: ModelShape, seed: int) -> None:
    """Fill weights of a model, given with their names, as its description says, or as its traced family does.

    Described models, and traced ones whose family's rule is not understood: norms are 1, biases 0, matrices normal with
    `INIT_STD`; those that write into the residual stream have it divided by sqrt(2 · num_layers) (GPT-2; Megatron-LM),
    so that it does not grow with depth. An adapter's first matrix has a variance of a third over the number of inputs,
    as in PEFT.
    """
    if model.family == FAMILY and (rules := find_rules(model.trace)[0]):
        _fill_by_rules(named, model, rules, seed)
        return
    constants = {"ones": 1.0, "zeros": 0.0}
    stds = {"normal": INIT_STD, "residual": INIT_STD / math.sqrt(2 * model.num_layers)}
    for name, parameter in named:
        weight = find_weight(model, name)
        if weight.initial in constants:
            assert isinstance(parameter, Tensor), "matrices alone are quantized"
            nn.init.constant_(parameter, constants[weight.initial])
        else:
            std = stds.get(weight.initial, 1 / math.sqrt(3 * weight.shape[-1]))
            fill_normal(parameter, std, seed, model.aliases.get(name, name))


def _fill_by_rules(
    named: Iterable[tuple[str, Tensor | QuantizedWeight]],
    model: ModelShape,
    rules: Mapping[str, InitialRule],
    seed: int,
) -> None:
    """Fill weights of a traced model; `rules` are by our names of the family's own parameters."""
    pieces = {f"{block}{each.name}": (block, each.piece) for block, each in list_described(model) if each.piece}
    for name, parameter in named:
        own, piece = model.aliases.get(name, name), None
        if own in pieces:
            block, piece = pieces[own]
            own = f"{block}{piece.name}"
        fill_by_rule(parameter, rules[own], seed, own, piece)


def find_part(weight: Tensor | QuantizedWeight) -> tuple[Tensor | QuantizedRows, tuple[int, ...]]:
    """`find_place` of a weight that may be quantized: its part takes values of the weight in either case."""
    return weight.find_place() if isinstance(weight, QuantizedWeight) else find_place(weight)


def find_place(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a tensor, which is the tensor itself where nothing splits it, and where in it that begins."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.dim()
    mesh, placements = parameter.device_mesh, parameter.placements
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return parameter.to_local(), tuple(offset)


def fill_normal(parameter: Tensor | QuantizedWeight, std: float, seed: int, name: str) -> None:
    """Fill a weight, or this rank's part of it, with the deviates of (seed, name), mean 0."""
    _fill(parameter, seed, name, lambda key, positions: std * _normal(key, positions))


def fill_by_rule(
    parameter: Tensor | QuantizedWeight, rule: InitialRule, seed: int, name: str, piece: Piece | None = None
) -> None:
    """Fill a weight, or this rank's part of it, with what its family draws into it, by the deviates of (seed, name).

    A weight that is a piece of the family's gets what lies there in it; rule and name are those of the whole.
    """

    def compute(key: int, positions: Tensor) -> Tensor:
        if piece is not None:
            width = math.prod(parameter.shape[1:])
            rows, columns = positions // width + piece.first, positions % width
            positions = columns * piece.rows + rows if piece.is_transposed else rows * width + columns
        return _draw(rule, key, positions)

    _fill(parameter, seed, name, compute)


def _draw(rule: InitialRule, key: int, positions: Tensor) -> Tensor:
    """Values by a rule, float64, one a position."""
    values = torch.zeros(positions.shape, dtype=torch.float64, device=positions.device)
    for draw in rule:
        if draw.kind == "constant":
            found = torch.full_like(values, *draw.numbers)
        elif draw.kind == "normal":
            mean, std = draw.numbers
            found = mean + std * _normal(key, positions)
        else:
            low, high = draw.numbers
            found = low + (high - low) * _uniform(key, positions)
        values = torch.where((positions >= draw.first) & (positions < draw.end), found, values)
    return values


@torch.no_grad()
def _fill(parameter: Tensor | QuantizedWeight, seed: int, name: str, compute: Callable[[int, Tensor], Tensor]) -> None:
    """Fill a weight, or this rank's part of it, with values by a key and by positions in the whole weight."""
    local, offset = find_part(parameter)
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little", signed=True)
    columns = torch.arange(local.shape[-1], device=local.device) + offset[-1]
    first_of_row = _number_rows(parameter.shape, local.shape, offset, local.device) * parameter.shape[-1]
    rows = local.view(-1, local.shape[-1]) if isinstance(local, Tensor) else local
    step = max(1, CHUNK // max(1, rows.shape[1]))
    for part, first in zip(rows.split(step), first_of_row.split(step), strict=True):
        part.copy_(compute(key, first[:, None] + columns))


def _number_rows(whole: Sequence[int], part: Sequence[int], offset: Sequence[int], device: torch.device) -> Tensor:
    """Number of each of a part's rows among those of the whole tensor; a row lies along the last dimension."""
    numbers = torch.zeros(1, dtype=torch.int64, device=device)
    for size, own, first in zip(whole[:-1], part[:-1], offset[:-1], strict=True):
        numbers = (numbers[:, None] * size + torch.arange(own, device=device) + first).flatten()
    return numbers


def _normal(key: int, positions: Tensor) -> Tensor:
    """Standard normal deviates, float64, one a position."""
    return torch.erfinv(2 * _uniform(key, positions) - 1) * math.sqrt(2)


def _uniform(key: int, positions: Tensor) -> Tensor:
    """Uniform deviates inside (0, 1), float64, one a position; at the ends normal ones would be infinite."""
    bits = _shift_right(_mix(positions * -0x61C8864680B583EB + key), 12)
    return (bits.to(torch.float64) + 0.5) * 2.0**-52


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser; int64 multiplication wraps around, which is what it needs."""
    z = (z ^ _shift_right(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shift_right(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, count: int) -> Tensor:
    """Shift without the sign."""
    return (z >> count) & ((1 << (64 - count)) - 1)
