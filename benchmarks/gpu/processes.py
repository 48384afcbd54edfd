"""From cells to rows: one process measures cells until something is wrong with it, then a new one goes on.

[Note: when a process ends]
Cells share a process as long as the device answers and has its memory back. An exception may keep tensors alive, and
a CUDA error makes a process useless: then the next cell gets a new one. So does the one after a cell that hangs.
"""

import gc
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from benchmarks.gpu.ceilings import measure_ceiling
from benchmarks.gpu.cells import Cell, Suite, Training
from benchmarks.gpu.predict import predict
from benchmarks.gpu.rows import Prediction, Reached, Row, Status, Trained
from benchmarks.gpu.training import measure_training
from dtlayout.cluster import Gpu
from dtlayout.costmodel.estimate import HOPELESS_SHARE
from dtlayout.device import Device
from dtlayout.errors import InvalidConfig
from dtlayout.training.devices import join_ranks, open_device

LEFT_BEHIND_BYTES = 256 << 20
"""What a cell may leave allocated for the next one: cuBLAS keeps workspaces of some 32 MiB a stream."""


class Hopeless(Exception):
    """A cell whose predicted peak is far above what the GPU has."""


def measure_all(cells: Sequence[Cell], run: Callable[[Cell, float], Row], suite: Suite) -> Iterator[Row]:
    """A row for each cell; `run` gives that of a cell and gets the seconds that it may take.

    What must run out of memory, since a smaller micro-batch of the same did, is not run.
    """
    deadline = time.monotonic() + suite.limit_s
    out_of_memory: list[Training] = []
    for cell in cells:
        left_s = deadline - time.monotonic()
        smaller = next((other for other in out_of_memory if needs_more(cell, other)), None)
        if smaller is not None:
            yield Row(cell=cell, status="oom", note=f"as micro_batch={smaller.micro_batch}, so not run")
        elif left_s <= 0:
            yield Row(cell=cell, status="not run", note=f"{suite.limit_s:g} s were over")
        else:
            row = run(cell, min(left_s, suite.cell_limit_s))
            if row.status == "oom" and isinstance(cell, Training):
                out_of_memory.append(cell)
            yield row


def needs_more(cell: Cell, other: Training) -> bool:
    """Whether `cell` is `other` with a larger micro-batch.

    One forward a step is another matter: without a second one FSDP2 keeps no fp32 sum of gradients.
    """
    if not isinstance(cell, Training):
        return False
    is_larger = other.micro_batch < cell.micro_batch < cell.global_batch
    return is_larger and cell == replace(other, micro_batch=cell.micro_batch)


class Worker:
    """A process that measures one cell after the other: see [Note: when a process ends]."""

    def __init__(self, suite: Suite):
        self.suite = suite
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def run(self, cell: Cell, limit_s: float) -> Row:
        """The row of a cell, whatever happens to the process meanwhile."""
        pipe = self._pipe or self._start()
        try:
            pipe.send(cell)
            if not pipe.poll(limit_s):
                self.close()
                status: Status = "error" if limit_s == self.suite.cell_limit_s else "not run"
                return Row(cell=cell, status=status, note=f"no result within {limit_s:.0f} s")
            answer: tuple[Row, bool] = pipe.recv()
        except (EOFError, OSError):
            exit_code = self.close(wait_s=10)
            return Row(cell=cell, status="error", note=f"the process ended with exit code {exit_code}")
        row, goes_on = answer
        if not goes_on:
            self.close()
        return row

    def close(self, wait_s: float = 0) -> int | None:
        """End the process if it does not end by itself meanwhile; its exit code."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if process is None or pipe is None:
            return None
        process.join(wait_s)
        process.kill()
        process.join()
        pipe.close()
        return process.exitcode

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(self.suite, theirs), daemon=True)
        self._process.start()
        theirs.close()
        return self._pipe


def work(suite: Suite, pipe: Connection) -> None:
    """Answer each cell with its row and whether there can be another one."""
    device = open_device(suite.device_type, None)
    join_ranks(device, suite.cell_limit_s)
    goes_on = True
    while goes_on:
        cell = pipe.recv()
        predicted, why = attempt_prediction(cell, device.gpu)
        row = attempt(cell, partial(measure, device=device, num_steps=suite.num_steps, predicted=predicted))
        row = replace(row, predicted=predicted, not_predicted=why, device=device.name)
        goes_on = is_usable(device)
        pipe.send((replace(row, peak_flops_per_s=device.peak_flops_per_s), goes_on))


def measure(cell: Cell, device: Device, num_steps: int, predicted: Prediction | None) -> Reached | Trained:
    """What a cell reaches on this device."""
    if not isinstance(cell, Training):
        return measure_ceiling(cell, device)
    if device.type == "cuda" and predicted and predicted.peak_bytes > HOPELESS_SHARE * predicted.capacity_bytes:
        need, capacity = (size / 2**30 for size in (predicted.peak_bytes, predicted.capacity_bytes))
        raise Hopeless(f"predicted to need {need:.0f} GiB of {capacity:.0f}")
    return measure_training(cell, device, num_steps)


def attempt(cell: Cell, run: Callable[[Cell], Reached | Trained]) -> Row:
    """The row of `run`, or what made it fail; memory is freed either way."""
    try:
        return Row(cell=cell, measured=run(cell))
    except (InvalidConfig, Hopeless) as error:
        return Row(cell=cell, status="not run", note=_first_line(error))
    except Exception as error:
        status: Status = "oom" if is_out_of_memory(error) else "error"
        return Row(cell=cell, status=status, note=f"{type(error).__name__}: {_first_line(error)}")
    finally:  # here the exception is gone, and with it the frames that held tensors
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        gc.collect()
        with suppress(RuntimeError):  # a broken CUDA context says so again
            torch.cuda.empty_cache()


def attempt_prediction(cell: Cell, gpu: Gpu | None) -> tuple[Prediction | None, str]:
    """The prediction of a training cell, or why there is none; a kernel that the cost model lacks ends no run."""
    if not isinstance(cell, Training):
        return None, ""
    if gpu is None:
        return None, "no numbers of this GPU are known"
    try:
        return predict(cell, gpu), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {_first_line(error)}"


def is_out_of_memory(error: Exception) -> bool:
    """Whether the GPU's memory was too small; only torch's own allocator has a type for that."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        text in str(error) for text in ("CUDA error: out of memory", "_STATUS_ALLOC_FAILED", "Cuda failure 2 ")
    )


def is_usable(device: Device) -> bool:
    """Whether the device still answers and has its memory back."""
    if device.type == "cpu":
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return torch.cuda.memory_allocated() <= LEFT_BEHIND_BYTES


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
