"""Parts of a checkpoint's tensors into memory, on one process: some experts of a stack, or a tensor as a whole."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dtlayout.base.errors import CheckpointError
from dtlayout.checkpoint.agreement import last_line
from dtlayout.checkpoint.reader import Reader
from dtlayout.checkpoint.sharded import UNREADABLE


@dataclass(frozen=True)
class Part:
    """Some rows of a parameter, and the memory for them."""

    name: str
    """The parameter's name in the whole model."""
    first: int
    """Index of the first row in the parameter; of a stack a row is an expert."""
    memory: Tensor
    """A tensor of as many rows, of any float format, on the CPU."""


def load_parts(path: Path, parts: Sequence[Part]) -> None:
    """Fill the memory of parts with a checkpoint's parameters. CheckpointError if they cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is meant
            dcp.load({}, storage_reader=Reader(path / "tensors"), planner=_PartPlanner(parts), no_dist=True)
    except UNREADABLE as error:
        raise CheckpointError(f"{path} cannot be read: {last_line(error)}") from error


class _PartPlanner(DefaultLoadPlanner):
    """Plans what is read for parts, which are told from each other by name and first row."""

    def __init__(self, parts: Sequence[Part]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts = {_index(part): part for part in parts}

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for part in self._parts.values() for item in self._plan(part)])

    def _plan(self, part: Part) -> Iterator[ReadItem]:
        assert self.metadata is not None, "it is read before anything is planned"
        index = _index(part)
        saved = self.metadata.state_dict_metadata.get(index.fqn)
        if not isinstance(saved, TensorStorageMetadata):
            raise ValueError(f"it has no {part.name}")
        if part.memory.shape[1:] != saved.size[1:] or part.first + part.memory.shape[0] > saved.size[0]:
            raise ValueError(f"{part.name} has the shape {list(saved.size)}, which is not the model's")
        assert index.offset is not None, "each part has one"
        yield from create_read_items_for_chunk_list(
            index.fqn, saved, [ChunkStorageMetadata(index.offset, part.memory.shape)]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._parts[MetadataIndex(index.fqn, index.offset)].memory


def _index(part: Part) -> MetadataIndex:
    first = torch.Size([part.first, *(0 for _ in part.memory.shape[1:])])
    return MetadataIndex(f"parameters.{part.name}", first)
