"""State on disk: sharded parameters and the optimizer's state as pages of files, in memory while they are used.

Each FSDP unit of a rank has a file of its parameters and one of the optimizer's state of them (`base/mapped_file.py`).
Tensors are views of mapped pages, so FSDP2, the optimizer and checkpoints use them like any others, and bits are the
same. What changes is which pages are in memory (ZeRO-Infinity, arXiv:2104.07857):

| moment | read | written |
|---|---|---|
| a unit is gathered | its parameters, while the unit before is computed | nothing |
| a unit is updated | parameters and state, while the unit before is updated | the same, while the next is updated |

Units are gathered in the same order in each step, so what was gathered next the last time is read ahead. Pages are
dropped after each use. So at most three units' state is in memory: one that is written, one that is updated, one that
is read. Gradients stay in the host's memory.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtlayout.base.mapped_file import PAGE, MappedFile
from dtlayout.mesh.parts import local_part
from dtlayout.plans.fsdp_records import find_group
from dtlayout.plans.init import allocate

FOLDER_KEY = "layout.offload_folder"
_ALIGNMENT = 64
"""Bytes on whose multiples tensors begin: a line of a processor's cache."""


class DiskUnit:
    """Parameters of one FSDP unit on this rank, with the files that hold them and the optimizer's state of them."""

    def __init__(self, group: Any):
        """`group` is FSDP2's group of the unit's parameters."""
        self.group = group
        self.files: list[MappedFile] = []
        """The parameters' file, and the state's if there is any; empty where nothing lies on a disk."""
        self.addresses: set[int] = set()
        """Addresses at which the storages of tensors in these files begin."""
        self._first_trained = 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Sharded parameters, in FSDP2's order."""
        return [each.sharded_param for each in self.group.fsdp_params]

    def place_parameters(self, folder: str) -> None:
        """Put the parameters' shards, with FSDP2's padding, into a file; frozen ones come first. They become zeros."""
        shards = sorted(self.group.fsdp_params, key=lambda each: each.sharded_param.requires_grad)
        sizes = [(each.padded_sharded_param_size, each.sharded_param.dtype) for each in shards]
        num_frozen = sum(not each.sharded_param.requires_grad for each in shards)
        padded, self._first_trained = self._map(folder, sizes, num_frozen)
        for shard, whole in zip(shards, padded, strict=True):
            local, dim = shard.sharded_param._local_tensor, shard.fsdp_placement.dim
            shard._sharded_param_data = whole.view(-1)
            shard.sharded_param._local_tensor = whole.narrow(dim, 0, local.size(dim)) if local.numel() else whole[:0]

    def place_state(self, folder: str, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Put the tensors that an optimizer keeps in the shape of parameters into a file. They become zeros."""
        kept = [
            each for p in self.parameters for each in state.get(p, {}).values() if each.shape == p.shape and each.dim()
        ]
        if kept:
            mapped, _ = self._map(folder, [(each._local_tensor.shape, each.dtype) for each in kept])
            for tensor, local in zip(kept, mapped, strict=True):
                tensor._local_tensor = local

    def _map(
        self, folder: str, sizes: Sequence[tuple[Sequence[int], torch.dtype]], num_apart: int = 0
    ) -> tuple[list[Tensor], int]:
        """Tensors in a new file, and the offset behind the first `num_apart`, where a page begins."""
        offsets, end, first = [], 0, 0
        for number, (shape, dtype) in enumerate(sizes):
            if number == num_apart:
                end = first = -(-end // PAGE) * PAGE
            offsets.append(end)
            end += -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        file = MappedFile(folder, max(end, 1), FOLDER_KEY)
        self.files.append(file)
        mapped = [
            torch.frombuffer(file.memory, dtype=dtype, count=prod(shape), offset=offset).view(tuple(shape))
            if prod(shape)
            else torch.empty(tuple(shape), dtype=dtype)
            for (shape, dtype), offset in zip(sizes, offsets, strict=True)
        ]
        self.addresses |= {each.untyped_storage().data_ptr() for each in mapped if each.numel()}
        return mapped, first

    def fetch_parameters(self) -> None:
        """Read all parameters into memory."""
        for file in self.files[:1]:
            file.fetch()

    def fetch(self) -> None:
        """Read what an update changes into memory."""
        for file, first in zip(self.files, (self._first_trained, 0), strict=False):
            file.fetch(first)

    def write_out(self) -> None:
        """Write what has changed, and drop all pages."""
        for file in self.files:
            file.write_out()

    def drop(self) -> None:
        """Drop the pages that are written."""
        for file in self.files:
            file.drop()


class DiskState:
    """Parameters and optimizer state of all stages of a rank, in files of a folder."""

    def __init__(self, units: Sequence[FSDPModule], folder: str):
        """`units` are those of all stages, in the order of the forward. Where `folder` is empty, as in a dry run,
        tensors stay where they are, and everything else is done all the same."""
        self.units = [DiskUnit(group) for unit in units if (group := find_group(unit)) is not None]
        self.folder = folder
        self._reader, self._writer = (ThreadPoolExecutor(1, thread_name_prefix=name) for name in ("read", "write"))
        self._gathered = -1, -1
        """The last two units that were gathered."""
        self._followed_by: dict[tuple[int, int], int] = {}
        """Two units that were gathered one after the other → the unit that was gathered next, the last time."""
        self._writing: deque[Future[None]] = deque()
        for number, unit in enumerate(self.units if folder else ()):
            self._watch(number, unit.group)

    def place_parameters(self, modules: Sequence[nn.Module]) -> None:
        """Give sharded modules on the meta device their memory: parameters in files, the rest on the host.

        InvalidConfig if the disk has no room for them.
        """
        if not self.folder:
            return
        allocate(modules, "cpu")  # memory that nobody touches, and which the files replace
        for unit in self.units:
            unit.place_parameters(self.folder)

    def place_state(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Put the optimizer's state into files; it becomes zeros. InvalidConfig if the disk has no room for it."""
        for unit in self.units if self.folder else ():
            unit.place_state(self.folder, state)

    def settle(self) -> None:
        """Write out everything, and have nothing in memory."""
        for unit in self.units:
            unit.write_out()

    def drop(self) -> None:
        """Drop all pages that are written, such as those that a checkpoint was written from."""
        for unit in self.units:
            unit.drop()

    def follow(self, leave: Callable[[DiskUnit], None]) -> Callable[[Tensor], None]:
        """A function to be told each tensor of the state, in whole or in part, that somebody is about to use.

        It calls `leave` with a unit when the tensor is another unit's, so that a pass over the state, such as a
        checkpoint's, has one unit in memory.
        """
        owners = {address: unit for unit in self.units for address in unit.addresses}
        last: DiskUnit | None = None

        def use(tensor: Tensor) -> None:
            nonlocal last
            unit = owners.get(local_part(tensor).untyped_storage().data_ptr())
            if last is not None and last is not unit:
                leave(last)
            last = unit

        return use

    def each_update(self, numbers: Sequence[int]) -> Iterator[int]:
        """The numbers of the units, each when it may be updated.

        Meanwhile the unit before is written, and the next one read.
        """
        if not self.folder:
            yield from numbers
            return
        reading = self._reader.submit(self.units[numbers[0]].fetch) if numbers else None
        for number, following in zip(numbers, [*numbers[1:], None], strict=True):
            if reading is not None:
                reading.result()
            while len(self._writing) > 1:
                self._writing.popleft().result()
            reading = None if following is None else self._reader.submit(self.units[following].fetch)
            yield number
            self._writing.append(self._writer.submit(self.units[number].write_out))

    def _watch(self, number: int, group: Any) -> None:
        """Call `_after_gather` whenever FSDP2 has gathered a unit: then its parameters were read."""
        wait = group.wait_for_unshard

        def wait_and_note() -> None:
            was_gathered = group.is_unsharded
            wait()
            if group.is_unsharded and not was_gathered:
                self._after_gather(number)

        group.wait_for_unshard = wait_and_note

    def _after_gather(self, number: int) -> None:
        """Drop a unit's pages, and read the parameters of the unit that is gathered next."""
        self.units[number].drop()
        self._followed_by[self._gathered] = number
        self._gathered = self._gathered[1], number
        if (following := self._followed_by.get(self._gathered)) is not None:
            self._reader.submit(self.units[following].fetch_parameters)
