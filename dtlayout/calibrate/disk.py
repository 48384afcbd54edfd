"""Speed of a node's disk: an update of state that lies on it, as `plans/disk.py` does one, without an optimizer."""

import torch

from dtlayout.base.mapped_file import PAGE, MappedFile
from dtlayout.calibrate.clock import time_together
from dtlayout.plans.disk import DiskState, DiskUnit

NODE_BYTES = 512 << 20
"""Bytes of state that the ranks of a node have together."""
_NUM_UNITS = 8


def measure_disk(folder: str, key: str, device_type: str, ranks_per_node: int) -> float:
    """Bytes per second that a node reads and writes in a folder, while all its ranks update their state there.

    Each byte is read once and written once. Pages of the kernel's cache are dropped in between, and an update ends when
    all is on the disk. InvalidConfig, with `key` for the folder's name, if it cannot be used or has too little room.
    """
    disk = DiskState([], folder)
    unit_bytes = max(1, NODE_BYTES // ranks_per_node // _NUM_UNITS // PAGE) * PAGE
    for _ in range(_NUM_UNITS):
        disk.units.append(unit := DiskUnit(None))
        unit.files.append(MappedFile(disk.folder, unit_bytes, key))
    pages = [torch.frombuffer(unit.files[0].memory, dtype=torch.uint8)[::PAGE] for unit in disk.units]

    def update() -> None:
        for number in disk.each_update(range(_NUM_UNITS)):
            pages[number].add_(1)  # a page is written whole
        disk.settle()

    update()  # of pages that were reserved and never written, nothing is read
    return 2 * ranks_per_node * _NUM_UNITS * unit_bytes / time_together(update, device_type)
