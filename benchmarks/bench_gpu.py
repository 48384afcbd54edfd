"""Train Llamas on one GPU, over micro-batch and recomputation: tokens/s, MFU, peak memory. Out of memory is a result.

    PYTHONPATH=. python benchmarks/bench_gpu.py [--out FOLDER] [--debug]

Needs torch and numpy alone. The trainer's own parts run, as a world of one rank, on synthetic tokens: bf16 compute,
fp32 masters, fused AdamW. A *cell* is one choice of all that varies, a *row* what came of it.

Every row takes the same optimizer step of `global_batch` sequences: a smaller micro-batch only means more forwards.
A step that records the attention kernels and one that measures memory come first; then the median of several.

[Note: one process until something fails]
Cells share a process as long as they succeed and give their memory back. After a failure the next cell gets a new
process, since an exception may keep tensors alive, and a CUDA error makes a process useless.
"""

import argparse
import gc
import json
import multiprocessing
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dtlayout.batch import Batch
from dtlayout.errors import NonFiniteLoss
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.measure.kernels import AttentionRecorder
from dtlayout.measure.memory import StorageTracker
from dtlayout.models.presets import find_preset
from dtlayout.precision import Precision
from dtlayout.training.build import assemble
from dtlayout.training.devices import Device, join_ranks, open_device
from dtlayout.training.metrics import Speed, write_whole
from dtlayout.training.optimizer import build_optimizer, set_learning_rate
from dtlayout.training.step import StepResult, TrainStep

SEED, LEARNING_RATE, MAX_NORM = 0, 1e-4, 1.0
LEFT_BEHIND_BYTES = 256 << 20
"""What a cell may leave allocated for the next one: cuBLAS keeps workspaces of some 32 MiB a stream."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one measurement trains."""

    model: str
    seq_len: int
    global_batch: int
    micro_batch: int
    recompute: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of a cell; the numbers are None where it did not train."""

    cell: Cell
    status: Literal["ok", "oom", "error", "not run"] = "ok"
    note: str = ""
    """Why it is not ok: first line of the failure."""
    device: str | None = None
    step_time_s: float | None = None
    """Median of the timed steps."""
    slowest_step_s: float | None = None
    tokens_per_s: float | None = None
    model_tflops_per_gpu: float | None = None
    mfu: float | None = None
    """None also where the GPU's peak is not known."""
    peak_flops_per_s: float | None = None
    """The 100 % of MFU."""
    peak_memory_bytes: int | None = None
    """torch.cuda.max_memory_allocated of a step; on CPU what StorageTracker counts."""
    attention_kernels: tuple[str, ...] = ()
    """Those that really ran."""
    loss: float | None = None
    """After the last step."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all cells have in common."""

    device_type: Literal["cuda", "cpu"]
    num_steps: int
    """Timed steps of a cell."""
    cell_limit_s: float = 90
    """After it a cell counts as hung."""
    limit_s: float = 450
    """After it nothing more is started."""


GPU = Settings(device_type="cuda", num_steps=4)
GPU_CELLS = [
    Cell(model=model, seq_len=4096, global_batch=8, micro_batch=micro_batch, recompute=recompute)
    for model, recompute, micro_batch in product(
        ("llama3.2-1b", "llama3.2-3b"), ("none", "selective", "full"), (1, 2, 4, 8)
    )
]
DEBUG = Settings(device_type="cpu", num_steps=2)
DEBUG_CELLS = [
    Cell(model="debug", seq_len=32, global_batch=2, micro_batch=micro_batch, recompute=recompute)
    for recompute, micro_batch in product(("none", "selective", "full"), (1, 2))
]


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write the report; exit code 1 if a row is neither ok nor oom."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks"), help="folder of the report")
    parser.add_argument("--debug", action="store_true", help="a tiny model on the CPU, to see that all of this runs")
    options = parser.parse_args(arguments)
    settings, cells = (DEBUG, DEBUG_CELLS) if options.debug else (GPU, GPU_CELLS)
    if settings.device_type == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here; use --debug to run the same at debug size on the CPU", file=sys.stderr)
        return 2
    command = shlex.join(["python", "benchmarks/bench_gpu.py", *arguments])
    rows: list[Row] = []
    print(HEADER, flush=True)
    for row in measure_all(cells, lambda left: run_apart(left, settings), settings.limit_s):
        rows.append(row)
        print(show(row), flush=True)
        write_report(options.out, command, settings, rows)
    return 0 if all(row.status in ("ok", "oom") for row in rows) else 1


def measure_all(cells: Sequence[Cell], start: Callable[[list[Cell]], Iterable[Row]], limit_s: float) -> Iterator[Row]:
    """A row for each cell. `start` yields rows of the first of those it is given, and may stop after any of them.

    What must run out of memory, since a smaller micro-batch of the same did, is not run.
    """
    deadline = time.monotonic() + limit_s
    left = list(cells)
    while left and time.monotonic() < deadline:
        for row in start(left[:]):
            rows = [row]
            if row.status == "oom":
                note = f"as micro_batch={row.cell.micro_batch}, so not run"
                rows += [Row(cell=c, status="oom", note=note) for c in left if needs_more(c, row.cell)]
            for found in rows:
                left.remove(found.cell)
                yield found
            if time.monotonic() > deadline:
                break
    for cell in left:
        yield Row(cell=cell, status="not run", note=f"{limit_s:g} s were over")


def needs_more(cell: Cell, other: Cell) -> bool:
    """Whether `cell` is `other` with a larger micro-batch.

    One forward a step is another matter: without a second one FSDP2 keeps no fp32 sum of gradients.
    """
    is_larger = other.micro_batch < cell.micro_batch < cell.global_batch
    return is_larger and cell == replace(other, micro_batch=cell.micro_batch)


def run_apart(cells: Sequence[Cell], settings: Settings) -> Iterator[Row]:
    """Rows of the cells from one new process, until one fails: see [Note: one process until something fails]."""
    context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(cells, settings, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        for done, cell in enumerate(cells):
            try:
                if not ours.poll(settings.cell_limit_s):
                    yield Row(cell=cell, status="error", note=f"no result within {settings.cell_limit_s:g} s")
                    return
                row = ours.recv()
            except EOFError:
                process.join()
                if process.exitcode or not done:
                    note = f"the process ended with exit code {process.exitcode}"
                    yield Row(cell=cell, status="error", note=note)
                return
            yield row
            if row.status != "ok":
                return
    finally:
        process.kill()
        process.join()


def work(cells: Sequence[Cell], settings: Settings, pipe: Connection) -> None:
    """Send a row for each cell, until one fails or leaves memory behind."""
    device = open_device(settings.device_type, "auto")
    join_ranks(device, settings.cell_limit_s)
    for cell in cells:
        row = attempt(cell, partial(measure, device=device, num_steps=settings.num_steps))
        pipe.send(replace(row, device=device.name, peak_flops_per_s=device.peak_flops_per_s))
        if row.status != "ok" or (device.type == "cuda" and torch.cuda.memory_allocated() > LEFT_BEHIND_BYTES):
            break
    dist.destroy_process_group()


def attempt(cell: Cell, run: Callable[[Cell], Row]) -> Row:
    """The row of `run`, or what made it fail; memory is freed either way."""
    try:
        return run(cell)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        note = f"{type(error).__name__}: {lines[0]}"
        return Row(cell=cell, status="oom" if is_out_of_memory(error) else "error", note=note)
    finally:  # here the exception is gone, and with it the frames that held tensors
        gc.collect()
        with suppress(RuntimeError):  # a broken CUDA context says so again
            torch.cuda.empty_cache()


def is_out_of_memory(error: Exception) -> bool:
    """Whether the GPU's memory was too small; only torch's own allocator has a type for that."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        text in str(error) for text in ("CUDA error: out of memory", "_STATUS_ALLOC_FAILED", "Cuda failure 2 ")
    )


def measure(cell: Cell, *, device: Device, num_steps: int) -> Row:
    """Build the trainer of a cell and time its steps."""
    model = find_preset(cell.model)
    batch = Batch(global_batch=cell.global_batch, seq_len=cell.seq_len)
    layout = Layout(micro_batch=cell.micro_batch, recompute=cell.recompute)
    layout.check(model, batch)
    assembly = assemble(model, batch, layout, Kernels(), Precision(), seed=SEED, device_type=device.type)
    optimizer = build_optimizer(assembly.modules, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    set_learning_rate(optimizer, LEARNING_RATE)
    train_step = TrainStep(assembly.runtime, optimizer, max_norm=MAX_NORM, mesh=assembly.mesh, aliases=model.aliases)
    step = partial(train_step, *make_tokens(batch, model.vocab_size, device.type))

    with AttentionRecorder() as attention:
        step()
    peak_bytes = measure_peak_bytes(step, StorageTracker(assembly.modules, [optimizer]), device.type)
    times_s, results = zip(*(time_once(step, device.type) for _ in range(num_steps)), strict=True)
    result = results[-1]
    if not result.is_finite:
        raise NonFiniteLoss(f"loss {result.loss}, gradient norm {result.grad_norm}")

    step_time_s = statistics.median(times_s)
    speed = Speed(model, batch, layout.world_size, device.peak_flops_per_s).describe(step_time_s)
    return Row(
        cell=cell,
        step_time_s=step_time_s,
        slowest_step_s=max(times_s),
        tokens_per_s=speed["tokens_per_s"],
        model_tflops_per_gpu=speed["model_tflops_per_gpu"],
        mfu=speed["mfu"],
        peak_memory_bytes=peak_bytes,
        attention_kernels=tuple(sorted(attention.executed)),
        loss=result.loss,
    )


def make_tokens(batch: Batch, vocab_size: int, device_type: str) -> tuple[Tensor, Tensor]:
    """Random tokens and the targets that follow them, [sequences, S] each."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(vocab_size, (batch.global_batch, batch.seq_len + 1), generator=generator).to(device_type)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def measure_peak_bytes(step: Callable[[], Any], tracker: StorageTracker, device_type: str) -> int:
    """The most that is allocated at any moment of a step; the tracker counts where torch has no allocator to ask."""
    if device_type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    with tracker:
        step()
    return tracker.peak_bytes


def time_once(step: Callable[[], StepResult], device_type: str) -> tuple[float, StepResult]:
    """Seconds from an idle device to an idle device, and what the step gave."""
    wait = torch.cuda.synchronize if device_type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    result = step()
    wait()
    return time.perf_counter() - started, result


HEADER = (
    "| model | sequence | micro-batch | recompute | tokens/s | MFU | step, s | peak memory | attention | result |\n"
    "|---|--:|--:|---|--:|--:|--:|--:|---|---|"
)


def show(row: Row) -> str:
    """A row of the Markdown table."""

    def form(value: float | None, spec: str, unit: str = "") -> str:
        return "n/a" if value is None else format(value, spec) + unit

    peak_gib = None if row.peak_memory_bytes is None else row.peak_memory_bytes / 2**30
    note = row.note.replace("|", "/")[:80]
    columns = (
        row.cell.model,
        str(row.cell.seq_len),
        str(row.cell.micro_batch),
        row.cell.recompute,
        form(row.tokens_per_s, ",.0f"),
        form(row.mfu, ".1%"),
        form(row.step_time_s, ".3f"),
        form(peak_gib, ".2f", " GiB"),
        ", ".join(row.attention_kernels) or "n/a",
        f"{row.status}: {note}" if note else row.status,
    )
    return f"| {' | '.join(columns)} |"


def write_report(folder: Path, command: str, settings: Settings, rows: Sequence[Row]) -> None:
    """Write FOLDER/bench_gpu-DEVICE.md and .json."""
    device = next((row.device for row in rows if row.device), "unknown device")
    peak = next((row.peak_flops_per_s for row in rows if row.peak_flops_per_s), None)
    facts = {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "peak_flops_per_s": peak,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
        "precision": asdict(Precision()),
        "timed_steps": settings.num_steps,
    }
    flat = [asdict(row.cell) | {k: v for k, v in asdict(row).items() if k != "cell"} for row in rows]
    lines = (
        f"# One GPU: {device}",
        "",
        f"`{command}`, {facts['date']}",
        "",
        f"Python {facts['python']}, torch {facts['torch']}, CUDA {facts['cuda'] or 'none'}, numpy {facts['numpy']}; "
        "bf16 compute, fp32 masters and gradients, fused AdamW, a world of one rank.",
        f"A step takes {rows[0].cell.global_batch} sequences, whatever the micro-batch; its time is the median of "
        f"{settings.num_steps}. MFU is tokens/s · (6N + 12·L·h·s) / peak; "
        + (f"the peak is {peak / 1e12:g} TFLOP/s." if peak else "this device's peak is not known."),
        "",
        HEADER,
        *map(show, rows),
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"bench_gpu-{re.sub('[^a-z0-9]+', '-', device.lower())}"
    write_whole(path.with_suffix(".md"), "\n".join(lines) + "\n")
    write_whole(path.with_suffix(".json"), json.dumps(facts | {"rows": flat}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
