"""Weights from a Hugging Face folder, and from a PEFT folder, into any layout.

A rank reads its own slices alone, and of several that hold the same only the first reads: the others get it from there.
Experts, which are a stack here and one tensor each on disk, are read one by one. Values that are NaN or infinite do not
go in. Frozen weights of few bits are quantized some rows at a time.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtlayout.base.errors import CheckpointError, InvalidConfig
from dtlayout.base.formatting import plural
from dtlayout.checkpoint.equality import check_equal_parts
from dtlayout.models.peft import find_adapter_tensors, list_adapter
from dtlayout.models.stored import StoredTensor, find_weights, name_first
from dtlayout.models.stored_names import StoredWeight
from dtlayout.models.weights import find_missing_rows, list_stored
from dtlayout.ops.quantized import QuantizedRows
from dtlayout.plans.init import CHUNK, allocate, fill_initial, find_part
from dtlayout.plans.quantize import QuantizedWeight, named_weights
from dtlayout.spec.model_shape import ModelShape

_ROWS_AT_ONCE = 4096


def load_weights(
    folder: Path,
    modules: Sequence[nn.Module],
    model: ModelShape,
    seed: int,
    device: torch.device | str,
    *,
    adapter: Path | None = None,
    group: dist.ProcessGroup | None = None,
    new_rows: Literal["mean", "normal"] = "mean",
) -> None:
    """`allocate`, and fill parameters with a folder's, of which `find_weight_problems` found none.

    Rows of the embedding and the head that the folder lacks are the mean of its rows, or drawn as first weights are.

    The weights of the model's adapter come from the PEFT folder `adapter`; without one they get their initial values,
    and `seed` decides nothing else. Ranks compare over `group`, by default the group of all, what must be equal.
    InvalidConfig or CheckpointError if something cannot be read, and InvalidConfig on every rank where a value is NaN
    or infinite in the parameter's format.
    """
    allocate(modules, device)
    named = [(model.aliases.get(n, n), weight) for module in modules for n, weight in named_weights(module)]
    weights = {weight.name: weight for weight in list_stored(model.base)}
    stored = find_weights(folder)
    if new_rows == "normal":
        grown = [(n, w) for n, w in named if n in weights and find_missing_rows(weights[n], stored)]
        fill_initial(grown, model, seed)
    _load(folder, stored, [(weight, weights[name]) for name, weight in named if name in weights], group, new_rows)
    own = [(name, weight) for name, weight in named if name not in weights]
    if adapter is None:
        fill_initial(own, model, seed)
    else:
        of_adapter = {weight.name: weight for weight in list_adapter(model)}
        _load(adapter, find_adapter_tensors(adapter), [(weight, of_adapter[name]) for name, weight in own], group)
    parameters = [(model.aliases.get(n, n), each) for module in modules for n, each in module.named_parameters()]
    check_equal_parts(parameters, [*model.aliases.values()], folder, group)


def _load(
    folder: Path,
    stored: Mapping[str, StoredTensor],
    weights: Sequence[tuple[Tensor | QuantizedWeight, StoredWeight]],
    group: dist.ProcessGroup | None,
    new_rows: Literal["mean", "normal"] = "mean",
) -> None:
    """Fill weights with a folder's tensors, on all ranks at once."""
    broken = Counter[str]()
    try:
        with OpenFiles() as files:
            for parameter, weight in weights:
                broken += _fill(parameter, weight, stored, files, new_rows)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__} {error}") from error
    refuse_broken(_add_up(broken, group), str(folder))


class OpenFiles(ExitStack):
    """Files of tensors that stay open, each opened when it is first read."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[Path, Any] = {}

    def find(self, file: Path) -> Any:
        """The file, open."""
        if file not in self._opened:
            self._opened[file] = self.enter_context(safe_open(file, framework="pt"))
        return self._opened[file]


@torch.no_grad()
def _fill(
    parameter: Tensor | QuantizedWeight,
    weight: StoredWeight,
    stored: Mapping[str, StoredTensor],
    files: OpenFiles,
    new_rows: Literal["mean", "normal"],
) -> Counter[str]:
    """Fill this rank's part of a weight; how many values that it has read of each tensor are NaN or infinite."""
    broken = Counter[str]()
    local, offset = find_part(parameter)
    sent = [parameter] if isinstance(parameter, Tensor) else [parameter.codes, parameter.scales]
    groups = _find_copies(sent[0])
    if all(dist.get_group_rank(group, dist.get_rank()) == 0 for group in groups):
        for name, part, first in _split(local, offset, weight):
            source = files.find(stored[name].file).get_slice(name)
            if find_missing_rows(weight, stored):
                assert isinstance(part, Tensor), "ends are not quantized"
                num_there = max(0, stored[name].shape[0] - first[0])
                if new_rows == "mean" and part.shape[0] > num_there:
                    part[num_there:] = find_mean(source, stored[name].shape[0])[first[1] : first[1] + part.shape[1]]
                part = part[:num_there]
            broken[name] += _read(part, first, source)
    for each in sent if groups else ():
        _broadcast(each, groups)
    return +broken


def find_mean(source: Any, num_rows: int) -> Tensor:
    """Mean of the first rows of a matrix, in double precision."""
    total = torch.zeros(source.get_shape()[1], dtype=torch.float64)
    for row in range(0, num_rows, _ROWS_AT_ONCE):
        total += source[row : min(row + _ROWS_AT_ONCE, num_rows)].double().sum(0)
    return total / num_rows


def _broadcast(parameter: Tensor, groups: Sequence[dist.ProcessGroup]) -> None:
    """Give the first rank's part of a parameter to the other ranks of its groups."""
    assert isinstance(parameter, DTensor), "nothing else has copies"
    local = parameter.to_local()
    sent = local.to(parameter.device_mesh.device_type)  # from where the groups send, wherever the state lies
    for group in groups:
        dist.broadcast(sent, group=group, group_src=0)
    if sent is not local:
        local.copy_(sent)


def _split(
    local: Tensor | QuantizedRows, offset: tuple[int, ...], weight: StoredWeight
) -> Iterator[tuple[str, Tensor | QuantizedRows, tuple[int, ...]]]:
    """Tensors on disk that a rank's part of a weight is of: name, that part of it, and where in it the part begins."""
    if not isinstance(local, Tensor):
        yield weight.tensors[0], local, offset
    elif weight.unit_dim is not None:
        yield weight.tensors[0], local.unsqueeze(weight.unit_dim), _insert(offset, weight.unit_dim)
    elif weight.piece is not None:
        yield weight.tensors[0], local.t() if weight.piece.is_transposed else local, weight.piece.find_place(offset)
    elif not weight.is_stack:
        yield weight.tensors[0], local, offset
    else:
        for number, part in enumerate(local, offset[0]):
            yield weight.tensors[number], part, offset[1:]


def _insert(offset: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*offset[:dim], 0, *offset[dim:])


def _read(part: Tensor | QuantizedRows, first: tuple[int, ...], source: Any) -> int:
    """Fill a part of a tensor, a few rows at a time; how many of its values are NaN or infinite in its format."""
    num_broken, num_rows = 0, max(1, CHUNK // max(1, prod(part.shape[1:])))
    rest = [slice(start, start + size) for start, size in zip(first[1:], part.shape[1:], strict=True)]
    for row in range(0, part.shape[0], num_rows):
        rows = part[row : row + num_rows]
        values = source[(slice(first[0] + row, first[0] + row + rows.shape[0]), *rest)]
        rows.copy_(values)
        num_broken += count_broken(rows if isinstance(rows, Tensor) else values.to(rows.dtype))
    return num_broken


def count_broken(values: Tensor) -> int:
    """How many values are NaN or infinite."""
    return sum(piece.numel() - int(piece.isfinite().sum()) for piece in values.reshape(-1).split(CHUNK))


def _add_up(broken: dict[str, int], group: dist.ProcessGroup | None) -> dict[str, int]:
    """The counts of all ranks of a group together, by default of all."""
    if not dist.is_initialized():
        return broken
    by_rank: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, broken, group=group)
    total: Counter[str] = Counter()
    for each in by_rank:
        total.update(each)
    return dict(total)


def refuse_broken(broken: dict[str, int], where: str) -> None:
    """InvalidConfig if tensors have values that are NaN or infinite; `broken` counts them by tensor."""
    counted = [f"{name} is NaN or infinite in {plural(count, 'place', ',')}" for name, count in broken.items()]
    if counted:
        raise InvalidConfig([f"{where}: {line}" for line in name_first(counted)])


def _find_copies(parameter: Tensor) -> list[dist.ProcessGroup]:
    """The groups over which a parameter's shard is the same."""
    if not isinstance(parameter, DTensor) or parameter.to_local().numel() == 0:
        return []
    mesh = parameter.device_mesh
    copies = [dim for dim, place in enumerate(parameter.placements) if place.is_replicate() and mesh.size(dim) > 1]
    return [mesh.get_group(dim) for dim in copies]
