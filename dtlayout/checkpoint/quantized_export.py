"""A Hugging Face folder whose linear layers are quantized, written a weight at a time.

Each weight is read in float32 and quantized once: of a run with an adapter, after the merge. In memory are the tensors
of one file, and one weight in float32 with what quantizing it takes. Which tensors a weight becomes is
`checkpoint.export_quantizers`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dtlayout.base.errors import InvalidConfig, KernelError
from dtlayout.checkpoint.export_quantizers import EXPORT_QUANTIZERS, Header
from dtlayout.checkpoint.first_weights import count_broken, refuse_broken
from dtlayout.checkpoint.hf import TensorPlace, WeightSource, write_config, writing
from dtlayout.checkpoint.kept import write_beside, write_json
from dtlayout.config.sections import DataConfig
from dtlayout.models.beside import CONFIG, read_table
from dtlayout.models.families import find_weight
from dtlayout.models.stored import INDEX
from dtlayout.models.stored_names import StoredWeight
from dtlayout.models.weights import FILE_BYTES, list_stored, make_index, plan_files
from dtlayout.spec.export_format import EXPORT_FORMATS
from dtlayout.spec.kernel_table import is_installed
from dtlayout.spec.model_shape import ModelShape

_REST = "bfloat16"
"""Format of what is not quantized."""


def check_quantized(model: ModelShape, name: str) -> None:
    """InvalidConfig if a model cannot be stored in the format of this name, KernelError if the package is missing."""
    chosen = EXPORT_FORMATS[name]
    if model.experts is not None:
        raise InvalidConfig(
            f"--quantize {name} cannot store {model.name}, a mixture of experts: transformers joins experts in a "
            f"stack, and opens no stack that is quantized; leave --quantize out"
        )
    if joined := next((weight for weight in list_stored(model) if weight.piece is not None), None):
        raise InvalidConfig(
            f"--quantize {name} cannot store {model.name}: {joined.tensors[0]} is several of our weights, or a "
            f"transposed one; leave --quantize out"
        )
    odd = [
        weight for weight in list_stored(model)
        if is_quantized(model, weight) and weight.shape[1] % (chosen.group or 1)
    ]  # fmt: skip
    if odd:
        widths = {weight.shape[1] for weight in odd}
        able = [each.name for each in EXPORT_FORMATS.values() if not any(width % (each.group or 1) for width in widths)]
        raise InvalidConfig(
            f"--quantize {name} has groups of {chosen.group} columns, which do not divide the {odd[0].shape[1]} of "
            f"{odd[0].name}; use {' or '.join(able)}"
        )
    if chosen.package and not is_installed(chosen.package.module):
        raise KernelError(
            f"--quantize {name}: no package {chosen.package.module} here; install it: {chosen.package.install}"
        )


def is_quantized(model: ModelShape, weight: StoredWeight) -> bool:
    """Whether an export stores a weight in few bits: the matrix of a linear layer inside a block."""
    described = find_weight(model, weight.name)
    return described.role == "matrix" and described.split is not None


def export_quantized(
    source: WeightSource,
    folder: Path,
    name: str,
    *,
    file_bytes: int = FILE_BYTES,
    max_seq_len: int | None = None,
    data: DataConfig | None = None,
    base: Path | None = None,
) -> int:
    """Write weights as a Hugging Face folder in the format of this name, on one process; the bytes of all tensors.

    `base`, `data` and `max_seq_len` are those of `export_weights`, and so are the errors; the model is one that
    `check_quantized` takes.
    """
    quantizer, weights = EXPORT_QUANTIZERS[name], list_stored_names(source.model)
    blank = {key: _make_blank(source.model, weight, name) for key, weight in weights.items()}
    tensors = {key: quantizer.flatten({key: each})[0] for key, each in blank.items()}
    header = quantizer.flatten(blank)[1]
    sizes = {key: sum(each.nbytes for each in parts.values()) for key, parts in tensors.items()}
    files = plan_files(sizes, file_bytes)
    with writing(source.place, folder) as made:
        write_beside(made, base, data)
        write_config(made, source.model, _REST, max_seq_len)
        config = read_table(made / CONFIG) | {"quantization_config": quantizer.describe()}
        write_json(made / CONFIG, config)
        for file, keys in files.items():
            _write_file(made / file, source, name, {key: tensors[key] for key in keys}, header)
        if len(files) > 1:
            of_files = {file: [part for key in keys for part in tensors[key]] for file, keys in files.items()}
            write_json(made / INDEX, make_index(of_files, sizes))
    return sum(sizes.values())


def list_stored_names(model: ModelShape) -> dict[str, StoredWeight]:
    """Name of each tensor on disk → its weight; of a model without stacks."""
    return {weight.tensors[0]: weight for weight in list_stored(model)}


def _make_blank(model: ModelShape, weight: StoredWeight, name: str) -> Any:
    """A weight on the meta device, quantized if it will be, from which sizes are read."""
    if is_quantized(model, weight):
        return EXPORT_QUANTIZERS[name].quantize(torch.empty(weight.shape, device="meta"))
    return torch.empty(weight.tensor_shape, dtype=getattr(torch, _REST), device="meta")


def read_weight(source: WeightSource, key: str, weight: StoredWeight, dtype: torch.dtype) -> Tensor:
    """Values of the weight that has the name `key` on disk, rounded once to a format."""
    return source.load({key: TensorPlace(weight, 0, dtype)})[key]


def _write_file(
    file: Path, source: WeightSource, name: str, blank: Mapping[str, Mapping[str, Tensor]], header: Header
) -> None:
    """Write a safetensors file of some weights, whose tensors `blank` has on the meta device.

    Memory for them is allocated first: between what is kept and what quantizing frees the heap would grow with each
    weight. InvalidConfig if values are NaN or infinite.
    """
    quantizer, weights = EXPORT_QUANTIZERS[name], list_stored_names(source.model)
    tensors = {part: torch.empty_like(each, device="cpu") for parts in blank.values() for part, each in parts.items()}
    broken: dict[str, int] = {}
    for key in blank:
        is_few_bits = is_quantized(source.model, weights[key])
        values = read_weight(source, key, weights[key], torch.float32 if is_few_bits else getattr(torch, _REST))
        if count := count_broken(values):
            broken[key] = count
            continue
        for part, each in quantizer.flatten({key: quantizer.quantize(values) if is_few_bits else values})[0].items():
            tensors[part].copy_(each)
    refuse_broken(broken, f"{source.place} in {name}")
    save_file(tensors, file, metadata={"format": "pt", **header})


def dequantize(source: WeightSource, weight: StoredWeight, exact: Tensor, name: str | None) -> Tensor:
    """Values of a weight as a folder holds them, in float32: rounded to bfloat16, or quantized in the format `name`."""
    if name is None or not is_quantized(source.model, weight):
        return exact.to(getattr(torch, _REST)).float()
    quantizer = EXPORT_QUANTIZERS[name]
    return quantizer.dequantize(quantizer.quantize(exact))
