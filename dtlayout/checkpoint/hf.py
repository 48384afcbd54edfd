"""Weights from a Hugging Face folder into any layout, or into a checkpoint, and from a checkpoint into such a folder.

A rank reads its own slices alone, and of several that hold the same only the first reads: the others get it from there.
Tensors go out a file at a time, and into a checkpoint a piece at a time. Experts, which are a stack here and one tensor
each on disk, are read and written one by one. Values that are NaN or infinite go neither in nor out. Which tensors and
files there are is `models.weights`, and what goes along with them `checkpoint.kept`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtlayout.base.errors import CheckpointError, InvalidConfig
from dtlayout.base.formatting import plural
from dtlayout.checkpoint.equality import check_equal_parts
from dtlayout.checkpoint.kept import made_whole, write_beside, write_json
from dtlayout.checkpoint.manifest import CHECKPOINTS
from dtlayout.checkpoint.parts import Part, load_parts
from dtlayout.checkpoint.sharded import read_model, save_weights
from dtlayout.config.sections import DataConfig
from dtlayout.models.beside import CONFIG, GENERATION, KEPT, read_table, update_config
from dtlayout.models.files import find_model, to_hf
from dtlayout.models.stored import FORMATS, INDEX, StoredTensor, find_weights, name_first
from dtlayout.models.stored_names import StoredWeight
from dtlayout.models.weights import FILE_BYTES, find_weight_problems, list_stored, make_index, plan_files
from dtlayout.plans.init import CHUNK, allocate, find_place
from dtlayout.spec.model_shape import ModelShape


def load_weights(
    folder: Path,
    modules: Sequence[nn.Module],
    model: ModelShape,
    seed: int,
    device: torch.device | str,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """`allocate`, and fill parameters with a folder's, of which `find_weight_problems` found none.

    Everything is the folder's, so that `seed` decides nothing. Ranks compare over `group`, by default the group of all,
    what must be equal. InvalidConfig or CheckpointError if it cannot be read, and InvalidConfig on every rank where a
    value is NaN or infinite in the parameter's format.
    """
    allocate(modules, device)
    stored, broken = find_weights(folder), Counter[str]()
    weights = {weight.name: weight for weight in list_stored(model)}
    named = [
        (model.aliases.get(name, name), parameter)
        for module in modules
        for name, parameter in module.named_parameters()
    ]
    try:
        with _Files() as files:
            for name, parameter in named:
                broken += _fill(parameter, weights[name], stored, files)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__} {error}") from error
    _refuse_broken(_add_up(broken, group), str(folder))
    check_equal_parts(named, [*model.aliases.values()], folder, group)


class _Files(ExitStack):
    """Files that stay open, each opened when it is first read."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[Path, Any] = {}

    def find(self, file: Path) -> Any:
        """The file, open."""
        if file not in self._opened:
            self._opened[file] = self.enter_context(safe_open(file, framework="pt"))
        return self._opened[file]


@torch.no_grad()
def _fill(parameter: Tensor, weight: StoredWeight, stored: Mapping[str, StoredTensor], files: _Files) -> Counter[str]:
    """Fill this rank's part of a parameter; how many values that it has read of each tensor are NaN or infinite."""
    broken = Counter[str]()
    local, offset = find_place(parameter)
    groups = _find_copies(parameter)
    if all(dist.get_group_rank(group, dist.get_rank()) == 0 for group in groups):
        for name, part, first in _split(local, offset, weight):
            broken[name] += _read(part, first, files.find(stored[name].file).get_slice(name))
    if isinstance(parameter, DTensor) and groups:
        sent = local.to(parameter.device_mesh.device_type)  # from where the groups send, wherever the state lies
        for group in groups:
            dist.broadcast(sent, group=group, group_src=0)
        if sent is not local:
            local.copy_(sent)
    return +broken


def _split(
    local: Tensor, offset: tuple[int, ...], weight: StoredWeight
) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """Tensors on disk that a rank's part of a weight is of: name, that part of it, and where in it the part begins."""
    if not weight.is_stack:
        yield weight.tensors[0], local, offset
        return
    for number, part in enumerate(local, offset[0]):
        yield weight.tensors[number], part, offset[1:]


def _read(part: Tensor, first: tuple[int, ...], source: Any) -> int:
    """Fill a part of a tensor, a few rows at a time; how many of its values are NaN or infinite."""
    num_broken, num_rows = 0, max(1, CHUNK // max(1, prod(part.shape[1:])))
    rest = [slice(start, start + size) for start, size in zip(first[1:], part.shape[1:], strict=True)]
    for row in range(0, part.shape[0], num_rows):
        rows = part[row : row + num_rows]
        rows.copy_(source[(slice(first[0] + row, first[0] + row + rows.shape[0]), *rest)])
        num_broken += _count_broken(rows)
    return num_broken


def _count_broken(values: Tensor) -> int:
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


def _refuse_broken(broken: dict[str, int], where: str) -> None:
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


def export_weights(
    checkpoint: Path,
    folder: Path,
    *,
    number_format: str = "bfloat16",
    file_bytes: int = FILE_BYTES,
    max_seq_len: int | None = None,
    data: DataConfig | None = None,
    base: Path | None = None,
) -> int:
    """Write a checkpoint's weights as a Hugging Face folder, on one process; the bytes of all tensors.

    `base` is the folder that the model came from, or what a run has kept of it: its files go along, as
    `checkpoint.kept.write_beside` says of it and of `data`, and its config.json with what has changed. None where the
    model came from nowhere. The folder is there when it is whole, in the place of what was there. CheckpointError if
    something cannot be read or written, DataError for the tokenizer, InvalidConfig for a model that no config.json
    describes, or for values that are NaN or infinite in this format.
    """
    try:
        model = read_model(checkpoint)
        places = _find_tensors(model, getattr(torch, number_format))
        sizes = {name: place.num_bytes for name, place in places.items()}
        files = plan_files(sizes, file_bytes)
        with made_whole(folder) as partial:
            write_beside(partial, base, data)
            _write_config(partial, model, number_format, max_seq_len)
            broken: dict[str, int] = {}
            for file, names in files.items():
                tensors = _load_tensors(checkpoint, {name: places[name] for name in names})
                broken |= {name: count for name, tensor in tensors.items() if (count := _count_broken(tensor))}
                save_file(tensors, partial / file, metadata={"format": "pt"})
            _refuse_broken(broken, f"{checkpoint} in {number_format}")
            if len(files) > 1:
                write_json(partial / INDEX, make_index(files, sizes))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{checkpoint} cannot be written to {folder}: {type(error).__name__} {error}") from error
    return sum(sizes.values())


@dataclass(frozen=True)
class _TensorPlace:
    """Weight and number of an expert that a tensor on disk is, and the format in which it goes out."""

    weight: StoredWeight
    number: int
    """The number of the expert in its stack; 0 where there is no stack."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return prod(self.weight.tensor_shape) * self.dtype.itemsize


def _find_tensors(model: ModelShape, dtype: torch.dtype) -> dict[str, _TensorPlace]:
    """The place of each tensor of a folder; what a step counts stays in float32, in which `transformers` has it."""
    exact = torch.promote_types(dtype, torch.float32)
    return {
        name: _TensorPlace(weight, number, exact if weight.is_counter else dtype)
        for weight in list_stored(model) for number, name in enumerate(weight.tensors)
    }  # fmt: skip


def _load_tensors(checkpoint: Path, places: Mapping[str, _TensorPlace]) -> dict[str, Tensor]:
    """Tensors out of a checkpoint; experts that follow each other in a stack are read together, into one memory."""
    tensors: dict[str, Tensor] = {}
    parts = []
    for _, group in groupby(places.items(), key=lambda item: item[1].weight.name):
        (name, place), *others = group
        shape = place.weight.tensor_shape
        memory = torch.empty((1 + len(others), *shape) if place.weight.is_stack else shape, dtype=place.dtype)
        parts.append(Part(place.weight.name, place.number, memory))
        names = [name, *(each for each, _ in others)]
        tensors |= zip(names, memory, strict=True) if place.weight.is_stack else {name: memory}
    load_parts(checkpoint, parts)
    return tensors


def _write_config(folder: Path, model: ModelShape, number_format: str, max_seq_len: int | None) -> None:
    """Write the model's config.json, on top of the one that is there; the file stays as it is where nothing differs."""
    path = folder / CONFIG
    if base := read_table(path):
        if (config := update_config(base, model, number_format, max_seq_len)) != base:
            write_json(path, config)
        return
    ids = {key: value for key, value in read_table(folder / GENERATION).items() if key.endswith("os_token_id")}
    write_json(path, to_hf(model, number_format, max_seq_len) | ids)


def import_weights(source: Path, folder: Path) -> int:
    """Write the weights of a Hugging Face folder as a run folder that has a checkpoint after no step; their bytes.

    On one process. They keep their formats, so that a run starts from the same bits as with `train.init_from`, and what
    lies beside them is kept for an export. The folder is there when it is whole. InvalidConfig for a model or weights
    that are not known, or are NaN or infinite, CheckpointError if something cannot be read or written.
    """
    model, stored = find_model(str(source / "config.json")), find_weights(source)
    if problems := find_weight_problems(stored, model):
        raise InvalidConfig([f"{source}: {problem}" for problem in problems])
    weights = {weight.name: weight for weight in list_stored(model)}
    formats = {name: _find_format(weight, stored) for name, weight in weights.items()}
    broken = Counter[str]()

    def read(name: str, rows: slice) -> Tensor:
        weight = weights[name]
        with (
            _Files() as files
        ):  # for this piece alone: what was read of an open file stays mapped, and counts as memory
            if not weight.is_stack:
                return read_tensor(weight.tensors[0], rows, files)
            made = torch.empty((rows.stop - rows.start, *weight.tensor_shape), dtype=formats[name])
            for row, tensor in zip(made, weight.tensors[rows], strict=True):
                row.copy_(read_tensor(tensor, slice(None), files))
            return made

    def read_tensor(name: str, rows: slice, files: _Files) -> Tensor:
        tensor: Tensor = files.find(stored[name].file).get_slice(name)[rows]
        broken[name] += _count_broken(tensor)
        return tensor

    try:
        with made_whole(folder) as partial:
            save_weights(partial / CHECKPOINTS, model, formats, read)
            _refuse_broken(+broken, str(source))
            (partial / KEPT).mkdir()
            write_beside(partial / KEPT, source, None)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{source} cannot be written to {folder}: {type(error).__name__} {error}") from error
    return sum(prod(weight.shape) * formats[name].itemsize for name, weight in weights.items())


def _find_format(weight: StoredWeight, stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """The format of a weight's tensors; of experts that differ one that holds the values of all."""
    formats = {FORMATS[stored[name].format] for name in weight.tensors}
    return reduce(torch.promote_types, (getattr(torch, name) for name in formats))
