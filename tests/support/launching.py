"""Start train.py as people do, alone or under torchrun, and leave nothing behind when it takes too long."""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from ranks import find_processes
from tiny import ROOT

TIME_LIMIT_S = 450
"""For one launch; a few seconds to half a minute is what it needs."""


@contextmanager
def started(
    num_ranks: int, *arguments: str | Path, log: Path, max_restarts: int = 0, **more: str
) -> Iterator[subprocess.Popen]:
    """train.py running on `num_ranks` ranks, without torchrun for one; whatever still lives at the end is killed.

    `more` goes into its environment.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    torchrun += ["--max-restarts", str(max_restarts)]
    command = [sys.executable, *(torchrun if num_ranks > 1 else []), "train.py", *map(str, arguments)]
    environment = _environment(more)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            for pid in (*_children(process.pid), process.pid):  # torchrun gives each worker a session of its own
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            process.wait()


def launch(num_ranks: int, *arguments: str | Path, log: Path, **more: str) -> int:
    """Run train.py to its end on ranks that torchrun has not started; the first exit code that is not 0, or 0.

    `more` goes into its environment.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = _environment(more)
    processes = []
    for rank in range(num_ranks):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = shared | ({name: str(value) for name, value in own.items()} if num_ranks > 1 else {})
        arguments_of_rank = (environment, list(map(str, arguments)), str(log))
        processes.append(find_processes().Process(target=_train, args=arguments_of_rank, daemon=True))
        processes[-1].start()
    deadline = time.monotonic() + TIME_LIMIT_S
    try:
        for process in processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                raise AssertionError(f"no end after {TIME_LIMIT_S} s:\n{log.read_text()[-3000:]}")
    finally:
        for process in processes:
            process.kill()
            process.join()
    return next((process.exitcode for process in processes if process.exitcode), 0)


def _train(environment: dict[str, str], arguments: list[str], log: str) -> None:
    """In a process of its own: what `python train.py` does."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    gc.freeze()  # as `ranks` does
    torch.set_num_threads(1)
    for plugin in filter(None, environment.get("DTLAYOUT_PLUGINS", "").split(",")):
        importlib.import_module(plugin)  # as dtlayout does, which is imported already
    sys.argv = ["train.py", *arguments]
    runpy.run_path("train.py", run_name="__main__")


def finish(process: subprocess.Popen, log: Path) -> int:
    """Wait for the end; the exit code."""
    try:
        return process.wait(timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"no end after {TIME_LIMIT_S} s:\n{log.read_text()[-3000:]}") from None


def wait_for_steps(process: subprocess.Popen, run: Path, num_steps: int, log: Path) -> None:
    """Return as soon as metrics.jsonl has that many lines."""
    deadline = time.monotonic() + TIME_LIMIT_S
    while len(read_lines(run)) < num_steps:
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"{num_steps} steps were not seen:\n{log.read_text()[-3000:]}")
        time.sleep(0.02)


def wait_for_start(process: subprocess.Popen, run: Path, log: Path) -> None:
    """Return as soon as the process says in a run folder that has a summary that it runs."""
    deadline = time.monotonic() + TIME_LIMIT_S
    while read_summary(run)["outcome"] != "running":
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"no start was seen:\n{log.read_text()[-3000:]}")
        time.sleep(0.002)


def read_lines(run: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def read_summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_lines(run)]


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **more}


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
