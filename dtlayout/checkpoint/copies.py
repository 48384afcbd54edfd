"""Copies of a rank's state in the host's memory, which are written while training goes on.

[Note: no update overtakes a copy]
A GPU copies on a stream of its own, into pinned memory, while the next step's forward and backward run: these read the
state and change nothing. The update that changes it waits on the device until the copies are made, in a hook of the
optimizer. The host waits for nothing; who writes the copies does, in a thread of its own.

Pinning memory for a large state takes tens of seconds. A thread pins it tensor after tensor while the first steps run.

A state on disk is not copied, since it may be larger than memory. It is written out of its own pages while the next
step's forward and backward run, and the host holds the update that would change it until that is done.
"""

from collections.abc import Callable, Mapping
from functools import partial
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from dtlayout.mesh.parts import local_part


class HeldState:
    """A rank's state on disk, which no update changes while it is written."""

    def __init__(self, optimizer: torch.optim.Optimizer, wait: Callable[[], None]):
        """`optimizer` is what changes the state, and `wait` returns when nobody writes it to a checkpoint any more."""
        optimizer.register_step_pre_hook(lambda *_: wait())

    def prepare(self, tensors: Mapping[str, Tensor]) -> int:
        """Do nothing, since no tensor is copied; 0 bytes."""
        return 0

    def take(self, tensors: Mapping[str, Tensor]) -> Callable[[], Mapping[str, Tensor]]:
        """A function that gives the tensors, which stay as they are until `wait` returns."""
        return lambda: tensors


class HostCopies:
    """A rank's state, in memory that each save uses again: tensors keep their names, shapes and places."""

    def __init__(self, optimizer: torch.optim.Optimizer, device_type: str):
        """`optimizer` is what changes the state."""
        self._copies: dict[str, Tensor] = {}
        self._stream = torch.cuda.Stream() if device_type == "cuda" else None
        self._made: torch.cuda.Event | None = None
        self._pinning: Thread | None = None
        optimizer.register_step_pre_hook(self._hold_update)

    def prepare(self, tensors: Mapping[str, Tensor]) -> int:
        """Begin to pin memory for copies of these tensors, beside what else the process does; its bytes.

        Memory that is not pinned, a CPU's, is made when it is needed: then it is 0.
        """
        if self._stream is None:
            return 0
        self._pinning = Thread(target=self._make_memory, args=(dict(tensors),), name="pinning memory", daemon=True)
        self._pinning.start()
        return sum(local_part(tensor).nbytes for tensor in tensors.values())

    def _make_memory(self, tensors: Mapping[str, Tensor]) -> None:
        for name in tensors.keys() - self._copies.keys():
            self._copies[name] = torch.empty_like(tensors[name], device="cpu", pin_memory=self._stream is not None)

    def take(self, tensors: Mapping[str, Tensor]) -> Callable[[], Mapping[str, Tensor]]:
        """Begin to copy: what waits until the copies are made, and gives them.

        From here on the optimizer may step. Nobody may still read the copies that were taken before.
        """
        if self._pinning is not None:
            self._pinning.join()
            self._pinning = None
        self._make_memory(tensors)  # of what nobody has prepared
        if self._stream is None:
            self._copy(tensors)
            return lambda: self._copies
        self._stream.wait_stream(torch.cuda.current_stream())  # of which an update was the last work
        made = self._made = torch.cuda.Event(blocking=True)  # who waits for it sleeps
        with torch.cuda.stream(self._stream):
            self._copy(tensors)
            made.record()
        # It holds the tensors: an optimizer may put others in their place, and their memory be used again too early.
        return partial(self._wait, made, tensors)

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            local_part(self._copies[name]).copy_(local_part(tensor), non_blocking=True)

    def _wait(self, made: torch.cuda.Event, _: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made.synchronize()
        return self._copies

    def _hold_update(self, *_: Any) -> None:
        """[Note: no update overtakes a copy]."""
        if self._made is not None:
            torch.cuda.current_stream().wait_event(self._made)
            self._made = None
