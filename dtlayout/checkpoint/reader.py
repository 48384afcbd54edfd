"""Reading what DCP wrote without running anything that a file says."""

import os
import pickle
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta


class Reader(dcp.FileSystemReader):
    """Reads tensors by torch's own safe loader, and metadata by ours."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with open(os.path.join(self.path, ".metadata"), "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(".metadata is no description of tensors")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the names that DCP writes to its metadata, and no other."""

    def find_class(self, module: str, name: str) -> Any:
        is_known = name in _METADATA_NAMES.get(module, ())
        if not is_known and not (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            raise pickle.UnpicklingError(f".metadata asks for {module}.{name}, which is refused")
        return super().find_class(module, name)


_METADATA_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex", "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
}  # fmt: skip
