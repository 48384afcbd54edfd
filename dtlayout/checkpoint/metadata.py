"""DCP's `.metadata` as torch's values of tensors, made by functions that check every part of it.

The file is a pickle, which `opcodes` reads. The only names that it may have are here, each with the function that makes
its value.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dtlayout.checkpoint.opcodes import AllowedNames, Name, RefusedPickle, parse

_MOST_DIMS = 16
_FILE_NAME = re.compile(r"__\d+_\d+\.distcp")
"""Name that DCP gives a file of tensors, beside its metadata."""


class _Ignored:
    """A value that nobody needs."""


_IGNORED = _Ignored()


def parse_metadata(content: bytes) -> Metadata:
    """The description of tensors that a `.metadata` holds; RefusedPickle if it is not what DCP writes of tensors.

    `content` may be whatever is indexed and sliced like bytes, such as a mapped file.
    """
    metadata = parse(content, _TABLES)
    if type(metadata) is not Metadata:
        raise RefusedPickle("is no description of tensors")
    return metadata


def _size(arguments: tuple[Any, ...]) -> torch.Size:
    (sizes,) = arguments if len(arguments) == 1 else (None,)
    if type(sizes) is not tuple or len(sizes) > _MOST_DIMS or not all(_is_count(size) for size in sizes):
        raise RefusedPickle(f"has a size that is not a tuple of up to {_MOST_DIMS} whole numbers")
    return torch.Size(sizes)


def _layout(arguments: tuple[Any, ...]) -> torch.layout:
    if arguments != ("torch.strided",):
        raise RefusedPickle("has tensors of another memory layout than torch.strided")
    return torch.strided


def _ignore(_: Any) -> _Ignored:
    return _IGNORED


def _metadata(fields: Any) -> Metadata:
    tensors, places = (_take(fields, name, dict) for name in ("state_dict_metadata", "storage_data"))
    for name, tensor in tensors.items():
        if type(name) is not str or type(tensor) is not TensorStorageMetadata:
            raise RefusedPickle("describes something that is no tensor")
    for index, place in places.items():
        if type(index) is not MetadataIndex or type(place) is not _StorageInfo:
            raise RefusedPickle("has a place of something that is no tensor")
    return Metadata(tensors, storage_data=places)


def _tensor(fields: Any) -> TensorStorageMetadata:
    properties, size = _take(fields, "properties", TensorProperties), _take(fields, "size", torch.Size)
    chunks = _take(fields, "chunks", list)
    for chunk in chunks:
        if type(chunk) is not ChunkStorageMetadata or not len(chunk.offsets) == len(chunk.sizes) == len(size):
            raise RefusedPickle("has a part of a tensor that has other dimensions than the tensor")
    return TensorStorageMetadata(properties, size, chunks)


def _chunk(fields: Any) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(_take(fields, "offsets", torch.Size), _take(fields, "sizes", torch.Size))


def _properties(fields: Any) -> TensorProperties:
    """The properties of a tensor: its number format, and four things that DCP keeps and no longer reads."""
    if type(fields) is not tuple or len(fields) != 5 or type(fields[0]) is not torch.dtype:
        raise RefusedPickle("has a tensor without a number format")
    return TensorProperties(fields[0])


def _index(fields: Any) -> MetadataIndex:
    index = fields.get("index") if type(fields) is dict else None
    if index is not None and not _is_count(index):
        raise RefusedPickle("has a place whose number is no whole number")
    return MetadataIndex(_take(fields, "fqn", str), _take(fields, "offset", torch.Size), index)


def _place(fields: Any) -> _StorageInfo:
    file, offset, length = _take(fields, "relative_path", str), *(_take(fields, n, int) for n in ("offset", "length"))
    if not _FILE_NAME.fullmatch(file) or fields.get("transform_descriptors") is not None:
        raise RefusedPickle(f"has tensors in {file[:100]!a}, which is no file that a run writes beside it")
    if not (_is_count(offset) and _is_count(length)):
        raise RefusedPickle("has a tensor before the beginning of a file")
    return _StorageInfo(file, offset, length)


def _take(fields: Any, name: str, kind: type) -> Any:
    value = fields.get(name) if type(fields) is dict else None
    if type(value) is not kind:
        raise RefusedPickle(f"has a {name} that is a {type(value).__name__} and no {kind.__name__}")
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _named(module: str, functions: dict[str, Callable[[Any], Any]]) -> dict[Name, Callable[[Any], Any]]:
    return {Name(module, name): function for name, function in functions.items()}


_METADATA = "torch.distributed.checkpoint.metadata"
_TABLES = AllowedNames(
    constants={Name("torch", name): value for name, value in vars(torch).items() if type(value) is torch.dtype},
    functions={
        **_named("torch", {"Size": _size}),
        **_named("torch.serialization", {"_get_layout": _layout}),
        **_named(_METADATA, {"_MEM_FORMAT_ENCODING": _ignore}),
        **_named("pathlib", {"PosixPath": _ignore}),  # where the checkpoint was written
        **_named("pathlib._local", {"PosixPath": _ignore}),  # Python 3.13
    },
    objects={
        **_named(
            _METADATA,
            {
                "Metadata": _metadata,
                "TensorStorageMetadata": _tensor,
                "ChunkStorageMetadata": _chunk,
                "TensorProperties": _properties,
                "MetadataIndex": _index,
                "StorageMeta": _ignore,
            },
        ),
        **_named("torch.distributed.checkpoint.filesystem", {"_StorageInfo": _place}),
    },
    keys=(str, MetadataIndex),
)
