"""Clock: seconds that an action takes on all ranks at once, and on one rank alone."""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from dtlayout.training.devices import wait_for_device

_LEAST_S = 0.1
"""Smallest total of seconds of all rounds of one action."""
_ROUNDS = 5


def time_together(action: Callable[[], object], device_type: str) -> float:
    """Seconds of an action that all ranks do at the same time: the median over rounds of the slowest rank."""
    action()
    repeats = _count_repeats(_time_slowest(action, 1, device_type))
    return median(_time_slowest(action, repeats, device_type) for _ in range(_ROUNDS))


def time_alone(action: Callable[[], object], device_type: str) -> float:
    """Seconds of an action that rank 0 does while the others wait; all ranks return the same number."""
    seconds = torch.zeros(1, dtype=torch.float64, device=device_type)
    _wait_for_all(device_type)
    if dist.get_rank() == 0:
        action()
        repeats = _count_repeats(time_repeats(action, 1, device_type))
        seconds[0] = median(time_repeats(action, repeats, device_type) for _ in range(_ROUNDS))
    dist.broadcast(seconds, 0)
    return float(seconds)


class ProcessorWatch:
    """Counts ticks of this machine's processors from its creation on, as the system reports them."""

    def __init__(self) -> None:
        self.start = _read_ticks()

    def steal(self) -> float:
        """Share of the processors' working time that a host of virtual machines gave to others."""
        spent = [now - before for before, now in zip(self.start, _read_ticks(), strict=True)]
        had_work = sum(spent) - sum(spent[3:5])  # not idle, nor waiting for a disk
        return spent[7] / had_work if had_work > 0 else 0.0


def _read_ticks() -> list[int]:
    """Ticks of user, nice, system, idle, iowait, irq, softirq, steal; zeros where the system does not report them."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            return [int(text) for text in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return [0] * 8


def time_repeats(action: Callable[[], object], repeats: int, device_type: str) -> float:
    """Seconds of an action, the mean of its repeats, from an idle device to an idle device."""
    wait_for_device(device_type)
    started = time.perf_counter()
    for _ in range(repeats):
        action()
    wait_for_device(device_type)
    return (time.perf_counter() - started) / repeats


def _count_repeats(once_s: float) -> int:
    """Repeats of an action in one round, from the seconds that it takes once."""
    return max(1, round(_LEAST_S / _ROUNDS / max(once_s, 1e-6)))


def _time_slowest(action: Callable[[], object], repeats: int, device_type: str) -> float:
    """Seconds of one action on the slowest rank, where all begin together."""
    _wait_for_all(device_type)
    found = torch.tensor([time_repeats(action, repeats, device_type)], dtype=torch.float64, device=device_type)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _wait_for_all(device_type: str) -> None:
    """Return once all ranks are here; NCCL gets this rank's GPU, which it would guess from the rank's number."""
    dist.barrier(device_ids=[torch.cuda.current_device()] if device_type == "cuda" else None)
