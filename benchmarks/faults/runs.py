"""Small runs of train.py that are to be disturbed: started, watched, ended, and compared to the bit."""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dtlayout.base.checkpoint_names import CHECKPOINTS, list_checkpoints
from dtlayout.checkpoint.manifest import find_damage
from dtlayout.checkpoint.reader import Reader
from dtlayout.sweep import processes
from dtlayout.training.metrics import MetricsFile, read_summary

CONFIG = "configs/debug.toml"
OPTIONS = (
    "--model.hidden_size=64", "--model.ffn_size=96", "--batch.seq_len=32", "--batch.global_batch=8",
    "--layout.micro_batch=2", "--data.max_tokens=100000", "--optimizer.warmup_steps=2", "--optimizer.decay_steps=400",
    "--metrics.log_every=1", "--metrics.memory_every=1000",
)  # fmt: skip
"""A small model, whose learning rate does not depend on how long the run is: nobody knows that before the faults."""
ALONE = ("--layout.pp=1", "--layout.tp=1")
PP2_TP2 = ("--layout.pp=2", "--layout.tp=2")
ENDLESS = 10**6
LIMIT_S = 300.0
"""Longest wait for anything; what is later has failed."""


class Late(Exception):
    """Something that was waited for did not come."""


def wait_until(holds: Callable[[], object], what: str, limit_s: float = LIMIT_S, every_s: float = 0.002) -> None:
    """Return when it holds; Late, with `what` it is, if it does not for too long."""
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            raise Late(f"no {what} within {limit_s:.0f} s")
        time.sleep(every_s)


@dataclass
class Start:
    """One start of train.py, whose processes are torchrun, or the ranks themselves."""

    run: Path
    log: Path
    mark: str
    processes: list[subprocess.Popen[bytes]]
    log_began: int

    @property
    def said(self) -> str:
        """Text that the run has printed so far."""
        with self.log.open("rb") as file:
            file.seek(self.log_began)
            return file.read().decode(errors="replace")

    @property
    def is_ending(self) -> bool:
        """Whether any process has ended."""
        return any(process.poll() is not None for process in self.processes)

    @property
    def is_over(self) -> bool:
        """Whether all have."""
        return all(process.poll() is not None for process in self.processes)

    @property
    def ranks(self) -> list[int]:
        """Process ids of the ranks that live."""
        if len(self.processes) > 1:
            return [process.pid for process in self.processes if process.poll() is None]
        agent = self.processes[0].pid
        with suppress(OSError):
            children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
            return [int(pid) for pid in children if "train.py" in _read_command(int(pid))]
        return []

    def wait(self, limit_s: float = LIMIT_S) -> list[int | None]:
        """The exit codes; Late if it takes longer."""
        wait_until(lambda: self.is_over, "end", limit_s, every_s=0.01)
        return [process.poll() for process in self.processes]

    def send(self, number: signal.Signals, pids: Sequence[int]) -> None:
        """Signal some of the ranks."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _read_command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


@contextmanager
def started(
    run: Path,
    *options: str,
    num_ranks: int = 4,
    restarts: int = 0,
    apart: bool = False,
    environment: dict[str, str] | None = None,
    log: Path | None = None,
    meeting: Sequence[str] = ("--standalone",),
) -> Iterator[Start]:
    """train.py under torchrun, or with `apart` as ranks that nothing watches; none of it is left afterwards.

    `meeting` is what torchrun is told of its rendezvous.
    """
    run.parent.mkdir(parents=True, exist_ok=True)
    log = log or run.with_name(f"{run.name}.log")
    mark = f"faults {os.getpid()} {log}"
    log.touch()
    folders = (f"--train.run_folder={run}", f"--data.folder={log.with_name('tokens')}")
    program = ["train.py", CONFIG, *OPTIONS, *folders, *options]
    common = ["env", "OMP_NUM_THREADS=1", *(f"{name}={value}" for name, value in (environment or {}).items())]
    torchrun = ["-m", "torch.distributed.run", *meeting, "--nproc-per-node", str(num_ranks)]
    if apart:
        port = f"MASTER_PORT={find_port()}"
        place = ["MASTER_ADDR=127.0.0.1", port, f"WORLD_SIZE={num_ranks}", f"LOCAL_WORLD_SIZE={num_ranks}"]
        place += ["GROUP_RANK=0", "GROUP_WORLD_SIZE=1"]
        commands = [
            [*common, *place, f"RANK={i}", f"LOCAL_RANK={i}", sys.executable, *program] for i in range(num_ranks)
        ]
    else:
        commands = [[*common, sys.executable, *torchrun, "--max-restarts", str(restarts), *program]]
    start = Start(run, log, mark, [], log.stat().st_size)
    with log.open("ab") as file:
        try:
            for command in commands:
                start.processes.append(processes.start(command, file, mark))
            yield start
        finally:
            for process in start.processes:
                processes.end(mark, process, grace_s=0.0)


def find_port() -> int:
    """A port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def finish(run: Path, num_steps: int, *options: str, **how: Any) -> str:
    """Train until a step, from wherever it is; what is wrong with how it ended, empty if nothing is."""
    with started(run, *options, f"--train.steps={num_steps}", **how) as start:
        codes = start.wait(2 * LIMIT_S)
        return "" if set(codes) == {0} else f"{run.name} ended with {codes}: {start.said[-300:]}"


def run_straight(run: Path, num_steps: int, *options: str, **how: Any) -> str:
    """A run that nothing interrupts; what is wrong with how it ended. One that has been whole stays."""
    if read_summary(run).get("steps") == num_steps and read_summary(run).get("outcome") == "done":
        return ""
    shutil.rmtree(run, ignore_errors=True)
    return finish(run, num_steps, *options, **how)


def count_steps(run: Path) -> int:
    """Steps that metrics.jsonl has."""
    return len(MetricsFile(run / "metrics.jsonl").read())


def is_saving(run: Path) -> bool:
    """Whether a checkpoint is being written, or was when all ranks died."""
    return any((run / CHECKPOINTS).glob("partial-*"))


def find_all_damage(run: Path) -> str:
    """Damage of all checkpoints that look whole and are not removed meanwhile; empty if there is none."""
    damage = [(path, find_damage(path)) for path in list_checkpoints(run / CHECKPOINTS)]
    return "; ".join(f"{path.name}: {each}" for path, found in damage for each in found if path.exists())


def compare(run: Path, straight: Path) -> str:
    """The first difference of losses, or of hashes of the last checkpoint's tensors; empty if there is none."""
    losses = [[line["loss"] for line in MetricsFile(each / "metrics.jsonl").read()] for each in (run, straight)]
    for step, (one, other) in enumerate(zip(*losses, strict=False), start=1):
        if one != other:
            return f"the loss of step {step} is {one}, without faults {other}"
    if len(losses[0]) != len(losses[1]):
        return f"there are {len(losses[0])} losses, without faults {len(losses[1])}"
    newest = [list_checkpoints(each / CHECKPOINTS)[-1] for each in (run, straight)]
    if newest[0].name != newest[1].name:
        return f"the last checkpoint is {newest[0].name}, without faults {newest[1].name}"
    hashes = [_hash_tensors(path) for path in newest]
    return "" if hashes[0] == hashes[1] else f"the tensors of {newest[0].name} differ"


def _hash_tensors(checkpoint: Path) -> dict[str, str]:
    """Name → SHA-256 of each whole tensor; which rank writes those that several hold is another one in each start."""
    described = Reader(checkpoint / "tensors").read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in described.items()
        if isinstance(each, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is meant
        dcp.load(tensors, storage_reader=Reader(checkpoint / "tensors"), no_dist=True)
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def say(*problems: str) -> str:
    """All problems that are not empty, as one line."""
    return "; ".join(filter(None, problems))
