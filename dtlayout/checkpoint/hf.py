"""Weights from a Hugging Face folder into any layout, or into a checkpoint, and from a checkpoint into such a folder.

A rank reads its own slices alone, and of several that hold the same only the first reads: the others get it from there.
Tensors go out a file at a time, and into a checkpoint a piece at a time. Which tensors and files there are is
`models.weights`.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtlayout.checkpoint.manifest import CHECKPOINTS
from dtlayout.checkpoint.sharded import load_parameters, read_model, save_weights
from dtlayout.config import DataConfig
from dtlayout.data.chat import TEMPLATE_NAME
from dtlayout.data.tokenizer import find_file, load_tokenizer
from dtlayout.errors import CheckpointError, InvalidConfig
from dtlayout.files import expand
from dtlayout.model_shape import ModelShape
from dtlayout.models.files import find_ends, find_model, to_hf
from dtlayout.models.weights import (
    FILE_BYTES,
    FORMATS,
    INDEX,
    StoredTensor,
    find_weight_problems,
    find_weights,
    list_weights,
    make_index,
    plan_files,
)
from dtlayout.plans.init import CHUNK, allocate, find_place

_TOKENIZER = "tokenizer.json"
_BESIDE_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", TEMPLATE_NAME)


def load_weights(
    folder: Path, modules: Sequence[nn.Module], model: ModelShape, seed: int, device: torch.device | str
) -> None:
    """`allocate`, and fill parameters with a folder's, of which `find_weight_problems` found none.

    Everything is the folder's, so that `seed` decides nothing. InvalidConfig or CheckpointError if it cannot be read.
    """
    allocate(modules, device)
    stored = find_weights(folder)
    try:
        with _Files() as files:
            for local_name, parameter in (named for module in modules for named in module.named_parameters()):
                name = model.aliases.get(local_name, local_name)
                _fill(parameter, stored[name], name, files)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read: {type(error).__name__} {error}") from error


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
def _fill(parameter: Tensor, stored: StoredTensor, name: str, files: _Files) -> None:
    local, offset = find_place(parameter)
    groups = _find_copies(parameter)
    if all(dist.get_group_rank(group, dist.get_rank()) == 0 for group in groups):
        rows = max(1, CHUNK // prod(local.shape[1:]))
        source = files.find(stored.file).get_slice(name)
        rest = [slice(start, start + size) for start, size in zip(offset[1:], local.shape[1:], strict=True)]
        for first in range(0, local.shape[0], rows):
            part = local[first : first + rows]
            part.copy_(source[(slice(offset[0] + first, offset[0] + first + part.shape[0]), *rest)])
    if isinstance(parameter, DTensor) and groups:
        sent = local.to(parameter.device_mesh.device_type)  # from where the groups send, wherever the state lies
        for group in groups:
            dist.broadcast(sent, group=group, group_src=0)
        if sent is not local:
            local.copy_(sent)


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
) -> int:
    """Write a checkpoint's weights as a Hugging Face folder, on one process; the bytes of all tensors.

    `data` says how the model's texts become ids, None where that is not known: the tokenizer's file goes along with the
    settings beside it, and the ids with which its texts begin and end; and so does the chat template, where it is a
    file. The folder is there when it is whole, in the place of what was there. CheckpointError if something cannot be
    read or written, DataError for the tokenizer, InvalidConfig for a model that no config.json describes.
    """
    known = load_tokenizer(data.tokenizer, data.end_of_document) if data else None
    file_of_tokenizer = find_file(data.tokenizer) if data else None
    # A chat model's answers end with another id than its documents, which stands beside its tokenizer.
    others = find_ends(file_of_tokenizer.parent) if file_of_tokenizer else []
    stops = list(dict.fromkeys([known.end_of_document, *others])) if known else []
    ends = {
        "bos_token_id": next(iter(known.begin), None) if known else None,
        "eos_token_id": stops if len(stops) > 1 else next(iter(stops), None),
    }
    dtype: torch.dtype = getattr(torch, number_format)
    try:
        model = read_model(checkpoint)
        config, shapes = to_hf(model, number_format, max_seq_len), dict(list_weights(model))
        sizes = {name: prod(shape) * dtype.itemsize for name, shape in shapes.items()}
        files = plan_files(sizes, file_bytes)
        with _made_whole(folder) as partial:
            if file_of_tokenizer is not None:
                _copy_tokenizer(file_of_tokenizer, partial)
            if data and data.chat_template:
                shutil.copyfile(expand(data.chat_template), partial / TEMPLATE_NAME)
            for file, names in files.items():
                tensors = {name: torch.empty(shapes[name], dtype=dtype) for name in names}
                load_parameters(checkpoint, tensors, alone=True)
                save_file(tensors, partial / file, metadata={"format": "pt"})
            if len(files) > 1:
                _write_json(partial / INDEX, make_index(files, sizes))
            _write_json(partial / "config.json", config | ends)
            _write_json(partial / "generation_config.json", ends)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{checkpoint} cannot be written to {folder}: {type(error).__name__} {error}") from error
    return sum(sizes.values())


def import_weights(source: Path, folder: Path) -> int:
    """Write the weights of a Hugging Face folder as a run folder that has a checkpoint after no step; their bytes.

    On one process. They keep their formats, so that a run starts from the same bits as with `train.init_from`. The
    folder is there when it is whole. InvalidConfig for a model or weights that are not known, CheckpointError if
    something cannot be read or written.
    """
    model, stored = find_model(str(source / "config.json")), find_weights(source)
    if problems := find_weight_problems(stored, model):
        raise InvalidConfig([f"{source}: {problem}" for problem in problems])
    formats: dict[str, torch.dtype] = {
        name: getattr(torch, FORMATS[stored[name].format]) for name, _ in list_weights(model)
    }
    try:
        with _made_whole(folder) as partial:

            def read(name: str, rows: slice) -> Tensor:
                # Opened anew for each piece: what was read of an open file stays mapped, and counts as memory.
                with safe_open(stored[name].file, framework="pt") as file:
                    tensor: Tensor = file.get_slice(name)[rows]
                return tensor

            save_weights(partial / CHECKPOINTS, model, formats, read)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{source} cannot be written to {folder}: {type(error).__name__} {error}") from error
    return sum(prod(shape) * formats[name].itemsize for name, shape in list_weights(model))


@contextmanager
def _made_whole(folder: Path) -> Iterator[Path]:
    """A folder beside it that takes its place when all is written."""
    partial, old = (folder.with_name(f".{kind}-{folder.name}") for kind in ("partial", "removed"))
    for left in (partial, old):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if folder.exists():
        os.replace(folder, old)
    os.replace(partial, folder)
    shutil.rmtree(old, ignore_errors=True)


def _copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    shutil.copyfile(tokenizer, folder / _TOKENIZER)
    for name in _BESIDE_TOKENIZER if tokenizer.name == _TOKENIZER else ():
        if (beside := tokenizer.with_name(name)).is_file():
            shutil.copyfile(beside, folder / name)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
