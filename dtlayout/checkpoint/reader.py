"""Reading what DCP wrote without running anything that a file says."""

import mmap
import os
import stat
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from dtlayout.checkpoint.metadata import parse_metadata
from dtlayout.checkpoint.opcodes import RefusedPickle


class Reader(dcp.FileSystemReader):
    """Reads tensors by torch's own safe loader, and metadata by ours."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        path = os.path.join(self.path, ".metadata")
        _check_file(path)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                metadata = parse_metadata(content)  # type: ignore[arg-type]  # it is indexed and sliced like bytes
            except RefusedPickle as error:
                raise ValueError(f".metadata {error}") from None
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for name in {self.storage_data[item.storage_index].relative_path for item in plan.items}:
            _check_file(os.path.join(self.path, name))
        return super().read_data(plan, planner)


def _check_file(path: str) -> None:
    """ValueError for what is there and no file: a pipe would be waited for, and a device has no end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{os.path.basename(path)} is no file")
