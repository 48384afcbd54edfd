"""Weights from a Hugging Face folder into any layout, or into a checkpoint, and from a checkpoint into such a folder.

A rank reads its own slices alone, and of several that hold the same only the first reads: the others get it from there.
Tensors go out a file at a time, and into a checkpoint a piece at a time. Values that are NaN or infinite go neither in
nor out. Which tensors and files there are is `models.weights`, and what goes along with them `checkpoint.kept`.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
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
from dtlayout.checkpoint.sharded import load_parameters, read_model, save_weights
from dtlayout.config.sections import DataConfig
from dtlayout.models.beside import CONFIG, GENERATION, KEPT, read_table, update_config
from dtlayout.models.files import find_model, to_hf
from dtlayout.models.stored import FORMATS, INDEX, StoredTensor, find_weights, name_first
from dtlayout.models.weights import FILE_BYTES, find_weight_problems, list_weights, make_index, plan_files
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
    named = [
        (model.aliases.get(name, name), parameter)
        for module in modules
        for name, parameter in module.named_parameters()
    ]
    try:
        with _Files() as files:
            for name, parameter in named:
                broken[name] += _fill(parameter, stored[name], name, files)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__} {error}") from error
    _refuse_broken(_add_up(+broken, group), str(folder))
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
def _fill(parameter: Tensor, stored: StoredTensor, name: str, files: _Files) -> int:
    """Fill this rank's part of a parameter; how many values that it has read are NaN or infinite."""
    num_broken = 0
    local, offset = find_place(parameter)
    groups = _find_copies(parameter)
    if all(dist.get_group_rank(group, dist.get_rank()) == 0 for group in groups):
        rows = max(1, CHUNK // prod(local.shape[1:]))
        source = files.find(stored.file).get_slice(name)
        rest = [slice(start, start + size) for start, size in zip(offset[1:], local.shape[1:], strict=True)]
        for first in range(0, local.shape[0], rows):
            part = local[first : first + rows]
            part.copy_(source[(slice(offset[0] + first, offset[0] + first + part.shape[0]), *rest)])
            num_broken += _count_broken(part)
    if isinstance(parameter, DTensor) and groups:
        sent = local.to(parameter.device_mesh.device_type)  # from where the groups send, wherever the state lies
        for group in groups:
            dist.broadcast(sent, group=group, group_src=0)
        if sent is not local:
            local.copy_(sent)
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
    dtype: torch.dtype = getattr(torch, number_format)
    try:
        model = read_model(checkpoint)
        shapes = dict(list_weights(model))
        sizes = {name: prod(shape) * dtype.itemsize for name, shape in shapes.items()}
        files = plan_files(sizes, file_bytes)
        with made_whole(folder) as partial:
            write_beside(partial, base, data)
            _write_config(partial, model, number_format, max_seq_len)
            broken: dict[str, int] = {}
            for file, names in files.items():
                tensors = {name: torch.empty(shapes[name], dtype=dtype) for name in names}
                load_parameters(checkpoint, tensors, alone=True)
                broken |= {name: count for name, tensor in tensors.items() if (count := _count_broken(tensor))}
                save_file(tensors, partial / file, metadata={"format": "pt"})
            _refuse_broken(broken, f"{checkpoint} in {number_format}")
            if len(files) > 1:
                write_json(partial / INDEX, make_index(files, sizes))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{checkpoint} cannot be written to {folder}: {type(error).__name__} {error}") from error
    return sum(sizes.values())


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
    formats: dict[str, torch.dtype] = {
        name: getattr(torch, FORMATS[stored[name].format]) for name, _ in list_weights(model)
    }
    broken: dict[str, int] = {}
    try:
        with made_whole(folder) as partial:

            def read(name: str, rows: slice) -> Tensor:
                # Opened anew for each piece: what was read of an open file stays mapped, and counts as memory.
                with safe_open(stored[name].file, framework="pt") as file:
                    tensor: Tensor = file.get_slice(name)[rows]
                if num_broken := _count_broken(tensor):
                    broken[name] = broken.get(name, 0) + num_broken
                return tensor

            save_weights(partial / CHECKPOINTS, model, formats, read)
            _refuse_broken(broken, str(source))
            (partial / KEPT).mkdir()
            write_beside(partial / KEPT, source, None)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{source} cannot be written to {folder}: {type(error).__name__} {error}") from error
    return sum(prod(shape) * formats[name].itemsize for name, shape in list_weights(model))
