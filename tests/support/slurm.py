"""As much of Slurm as scripts/slurm.sbatch uses, on this machine: srun, scancel and scontrol, which note their calls.

`python slurm.py NAME ARGUMENTS…` is one of them. As Slurm's do, a task that ends badly takes the others with it, srun
kills its tasks when it gets a SIGTERM, and scancel signals every process of a step.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dtlayout.sweep import processes

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "slurm.sbatch"
TIME_LIMIT_S = 300
JOB = "42"


class Slurm:
    """A folder in which the commands lie and note their calls; of nodes that have these addresses."""

    def __init__(self, folder: Path, addresses: Sequence[str] = ("127.0.0.1",), namespaces: Sequence[str] = ()):
        self.folder, self.log = folder, folder / "log"
        self.cwd = ROOT
        (folder / "bin").mkdir(parents=True)
        for name in ("srun", "scancel", "scontrol"):
            command = folder / "bin" / name
            command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
            command.chmod(0o755)
        self.environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self.environment |= {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RANKS_PER_NODE": "1", "SLURM_JOB_ID": JOB,
            "SLURM_JOB_NUM_NODES": str(len(addresses)), "SLURM_JOB_NODELIST": ",".join(addresses),
            "FAKE_SLURM": str(folder), "FAKE_NAMESPACES": " ".join(namespaces),
        }  # fmt: skip

    @contextmanager
    def submitted(self, *arguments: str | Path, step: str = "", **environment: str) -> Iterator[subprocess.Popen]:
        """The script running; `step` is what each task does instead of training. Nothing of it is left at the end."""
        environment = {**self.environment, "FAKE_STEP": step, **environment}
        command = ["bash", str(SCRIPT), *map(str, arguments)]
        with self.log.open("ab") as log:
            process = subprocess.Popen(command, cwd=self.cwd, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            processes.end(str(self.folder), grace_s=0.1)
            process.kill()
            process.wait()

    def submit(self, *arguments: str | Path, step: str = "", **environment: str) -> int:
        """Run the script to its end; its exit code."""
        with self.submitted(*arguments, step=step, **environment) as process:
            return process.wait(timeout=TIME_LIMIT_S)

    @property
    def calls(self) -> list[str]:
        """What was called, in order."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def num_requeued(self) -> int:
        """How often the job was requeued."""
        return self.calls.count(f"scontrol requeue {JOB}")


def _srun(mark: str, arguments: list[str]) -> int:
    options = dict(option.partition("=")[::2] for option in arguments if option.startswith("--nodes="))
    addresses, namespaces = os.environ["SLURM_JOB_NODELIST"].split(","), os.environ["FAKE_NAMESPACES"].split()
    command = arguments[next(i for i, argument in enumerate(arguments) if not argument.startswith("--")) :]
    if os.environ["FAKE_STEP"]:
        command = ["bash", "-c", os.environ["FAKE_STEP"]]
    signal.signal(signal.SIGTERM, lambda *_: _kill(mark))
    tasks = []
    for node in range(int(options["--nodes"])):
        place = {"SLURM_NODEID": node, "SLURM_PROCID": node, "SLURM_STEP_NUM_TASKS": len(addresses)}
        os.environ.update({name: str(value) for name, value in place.items()}, SLURMD_NODENAME=addresses[node])
        prefix = ["ip", "netns", "exec", namespaces[node]] if namespaces else []
        tasks.append(processes.start([*prefix, *command], sys.stdout, mark))
    while None in (codes := [task.poll() for task in tasks]):
        if any(codes):
            _kill(mark)
        time.sleep(0.05)
    return max(abs(code or 0) for code in codes)


def _kill(mark: str) -> None:
    for pid in processes.find(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _scancel(mark: str, arguments: list[str]) -> int:
    assert arguments == ["--signal=TERM", JOB]
    for pid in processes.find(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    return 0


def _scontrol(mark: str, arguments: list[str]) -> int:
    if arguments[:2] == ["show", "hostnames"]:
        print(arguments[2].replace(",", "\n"))
    return 0


if __name__ == "__main__":
    _, name, *rest = sys.argv
    folder = os.environ["FAKE_SLURM"]
    with Path(folder, "calls").open("a") as calls:
        calls.write(f"{name} {' '.join(rest)}\n")
    sys.exit({"srun": _srun, "scancel": _scancel, "scontrol": _scontrol}[name](folder, rest))
