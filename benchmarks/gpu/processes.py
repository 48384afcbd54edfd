"""From cells to rows: one process measures cells until something is wrong with it, then a new one goes on.

[Note: when a process ends]
Cells share a process as long as they want the same world, the device answers and has its memory back. An exception may
keep tensors alive, and a CUDA error makes a process useless: then the next cell gets a new one. So does the one after a
cell that hangs.
"""

import gc
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu import bits, ceilings, checks
from benchmarks.gpu.calibration import measure_calibration
from benchmarks.gpu.cells import (
    AttentionCall,
    BitsCheck,
    Calibration,
    Cell,
    HostTime,
    OperationCheck,
    StepCheck,
    Training,
    World,
)
from benchmarks.gpu.predict import predict
from benchmarks.gpu.rows import Checked, HostTimes, Measurement, Prediction, Row, Status
from benchmarks.gpu.suites import Suite
from benchmarks.gpu.training import PRECISION, measure_training
from benchmarks.host_time import measure_host_s
from dtlayout.base.errors import InvalidConfig
from dtlayout.costmodel.estimate import HOPELESS_SHARE
from dtlayout.ops.attention import attention_implementation
from dtlayout.spec.cluster import Gpu
from dtlayout.spec.device import Device
from dtlayout.spec.kernel_records import KernelRequest
from dtlayout.spec.kernels import Kernels
from dtlayout.sweep.results import tells_out_of_memory
from dtlayout.training.devices import open_device, repeat_bits
from dtlayout.training.rendezvous import join_ranks

LEFT_BEHIND_BYTES = 256 << 20
"""Most bytes that a cell may leave allocated for the next one: cuBLAS keeps workspaces of some 32 MiB a stream."""
PATIENCE_S = 10.0
"""How long a process may take to end by itself."""
MOST_TRIES = 2
"""How often a cell that ends in an error is measured, over all calls."""
MEASURES: dict[type[Any], Callable[[Any, Device], Measurement]] = {
    **checks.MEASURES,
    **bits.MEASURES,
    **dict.fromkeys(ceilings.PREPARE, ceilings.measure_ceiling),
    HostTime: lambda cell, device: HostTimes(layer_s=measure_host_s(cell.tp, cell.compile, device.type)),
    Calibration: measure_calibration,
}
"""Kind of a cell → what measures it; of a training it takes more."""


class Hopeless(Exception):
    """A cell whose predicted peak is far above what the GPU has."""


def find_open(cells: Sequence[Cell], rows: Sequence[Row]) -> list[Cell]:
    """Cells that are still to be measured: those without a row, then once more those whose row is an error."""
    tries = Counter(row.cell for row in rows)
    settled = {row.cell for row in rows if row.status != "error"}
    failed = [cell for cell in cells if cell not in settled and 0 < tries[cell] < MOST_TRIES]
    return [*(cell for cell in cells if not tries[cell]), *failed]


def measure_all(
    cells: Sequence[Cell], rows: Sequence[Row], run: Callable[[Cell, float], Row | None], deadline: float
) -> Iterator[Row]:
    """A row for each cell that is still open, until `deadline` on the monotonic clock.

    `run` gives the row of a cell and gets the seconds that are left; None if they were too few. What must run out of
    memory, since a smaller micro-batch of the same did, is not run.
    """
    out_of_memory = [row.cell for row in rows if row.status == "oom" and isinstance(row.cell, Training)]
    for cell in find_open(cells, rows):
        smaller = next((other for other in out_of_memory if needs_more(cell, other)), None)
        if smaller is not None:
            yield Row(cell=cell, status="oom", note=f"as micro_batch={smaller.micro_batch}, so not run")
            continue
        left_s = deadline - time.monotonic()
        row = run(cell, left_s) if left_s > 0 else None
        if row is None:
            return
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
        self._world: World = "none"
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def run(self, cell: Cell, left_s: float) -> Row | None:
        """The row of a cell, whatever happens to the process meanwhile; None if it has none after `left_s`."""
        if cell.world != self._world:
            self.close(PATIENCE_S)
        pipe = self._pipe or self._start(cell.world)
        limit_s = min(left_s, self.suite.cell_limit_s)
        try:
            pipe.send(cell)
            if not pipe.poll(limit_s):
                self.close()
                is_hung = limit_s == self.suite.cell_limit_s
                return Row(cell=cell, status="error", note=f"no result within {limit_s:.0f} s") if is_hung else None
            answer: tuple[Row, bool] = pipe.recv()
        except (EOFError, OSError):
            exit_code = self.close(PATIENCE_S)
            return Row(cell=cell, status="error", note=f"the process ended with exit code {exit_code}")
        row, goes_on = answer
        if not goes_on:
            self.close(PATIENCE_S)
        return row

    def close(self, wait_s: float = 0) -> int | None:
        """Ask the process to end, and end it and what it started if it has not after `wait_s`; its exit code."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if process is None or pipe is None:
            return None
        pipe.close()
        process.join(wait_s)
        assert process.pid is not None, "it was started"
        with suppress(ProcessLookupError):  # it has gone, or has no group of its own yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        return process.exitcode

    def _start(self, world: World) -> Connection:
        context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(self.suite, world, theirs), daemon=True)
        self._process.start()
        self._world = world
        theirs.close()
        return self._pipe


def work(suite: Suite, world: World, pipe: Connection) -> None:
    """Answer each cell with its row and whether there can be another one."""
    os.setpgrp()  # so that what a cell starts ends with this process
    if world == "one rank, deterministic":
        repeat_bits(suite.device_type)
    device = open_device(suite.device_type, None)
    if world != "none":
        join_ranks(device, suite.cell_limit_s)
    goes_on = True
    while goes_on:
        try:
            cell = pipe.recv()
        except EOFError:  # nobody asks for more
            break
        predicted, why = attempt_prediction(cell, device.gpu)
        row = attempt(cell, partial(measure, device=device, num_steps=suite.num_steps, predicted=predicted))
        row = replace(row, predicted=predicted, not_predicted=why, device=device.name, torch=torch.__version__)
        goes_on = is_usable(device)
        pipe.send((replace(row, peak_flops_per_s=device.peak_flops_per_s), goes_on))
    if goes_on and dist.is_initialized():  # after a failure NCCL might wait
        dist.destroy_process_group()


def measure(cell: Cell, device: Device, num_steps: int, predicted: Prediction | None) -> Measurement:
    """The measurement of a cell on this device."""
    kernels = kernels_of(cell)
    if kernels is not None:
        kernels.check(KernelRequest(device=device, compute=PRECISION.compute))
    with nullcontext() if kernels is None else attention_implementation(kernels.attention):
        if not isinstance(cell, Training):
            return MEASURES[type(cell)](cell, device)
        if device.type == "cuda" and predicted and predicted.peak_bytes > HOPELESS_SHARE * predicted.capacity_bytes:
            need, capacity = (size / 2**30 for size in (predicted.peak_bytes, predicted.capacity_bytes))
            raise Hopeless(f"predicted to need {need:.0f} GiB of {capacity:.0f}")
        return measure_training(cell, device, num_steps)


def kernels_of(cell: Cell) -> Kernels | None:
    """The kernels that a cell runs; None where it chooses none."""
    match cell:
        case BitsCheck():
            return cell.step.kernels
        case AttentionCall():
            return Kernels(attention=cell.kernel)
        case OperationCheck() | StepCheck() | Training():
            return cell.kernels
    return None


def attempt(cell: Cell, run: Callable[[Cell], Measurement]) -> Row:
    """The row of `run`, or what made it fail; memory is freed either way."""
    try:
        measured = run(cell)
        wrong = measured.wrong if isinstance(measured, Checked) else ""
        return Row(cell=cell, status="error" if wrong else "ok", note=wrong, measured=measured)
    except (InvalidConfig, Hopeless) as error:
        return Row(cell=cell, status="not run", note=str(error).partition("\n")[0])
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        status: Status = "oom" if tells_out_of_memory(said) else "error"
        return Row(cell=cell, status=status, note=said.partition("\n")[0])
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
        return None, f"{type(error).__name__}: {error}".partition("\n")[0]


def is_usable(device: Device) -> bool:
    """Whether the device still answers and has its memory back."""
    if device.type == "cpu":
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return torch.cuda.memory_allocated() <= LEFT_BEHIND_BYTES
