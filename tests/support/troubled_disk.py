"""A plugin with which a run has trouble with the disk that holds its state, or with the one that takes its checkpoints.

The variable DISK_TROUBLE of the environment has a JSON object. `delay_s` seconds pass before each reading and each
writing of a file of the state, `save_s` before tensors are written to a checkpoint. `killed_in = [n, k]` kills the
process in update n, both counted from 1, when the k-th unit has its parameters on the disk and not yet their state.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed.checkpoint as dcp

from dtlayout.base.mapped_file import MappedFile
from dtlayout.plans.disk import DiskState, DiskUnit

TROUBLE = "DISK_TROUBLE"


def _delay(owner: type, name: str, seconds: float) -> None:
    """Let so many seconds pass before each call of a method."""
    original: Callable[..., Any] = getattr(owner, name)

    def late(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return original(*arguments, **options)

    setattr(owner, name, late)


def _kill_in(update: int, unit: int) -> None:
    """Kill the process in the middle of writing a unit."""
    each_update, write_out = DiskState.each_update, DiskUnit.write_out
    begun: list[int] = []
    """Units that each update until now has written."""

    def count_update(self: DiskState, numbers: Sequence[int]) -> Iterator[int]:
        begun.append(0)
        yield from each_update(self, numbers)

    def count_write(self: DiskUnit) -> None:
        if begun:  # and not before the first update
            begun[-1] += 1
            if (len(begun), begun[-1]) == (update, unit):
                self.files[0].write_out()
                os.kill(os.getpid(), signal.SIGKILL)
        write_out(self)

    DiskState.each_update, DiskUnit.write_out = count_update, count_write  # type: ignore[method-assign]


if text := os.environ.get(TROUBLE):
    trouble = json.loads(text)
    for name in ("fetch", "write_out") if "delay_s" in trouble else ():
        _delay(MappedFile, name, trouble["delay_s"])
    if "save_s" in trouble:
        _delay(dcp.FileSystemWriter, "write_data", trouble["save_s"])
    if "killed_in" in trouble:
        _kill_in(*trouble["killed_in"])
