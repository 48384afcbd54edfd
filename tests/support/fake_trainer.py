"""Stands in for train.py: ends as the seed says, and leaves what a run leaves. python fake_trainer.py CONFIG"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import tomllib

ENDS = ("ok", "oom", "crashed", "hung", "killed", "non_finite", "refused")
"""seed mod 20 → how it ends; ok beyond them."""


def main() -> int:
    config = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    seed, run = config["train"]["seed"], Path(config["train"]["run_folder"])
    with (run.parents[2] / "starts.txt").open("a") as file:
        file.write(f"{seed}\n")
    run.mkdir(parents=True, exist_ok=True)
    end = ENDS[seed % 20] if seed % 20 < len(ENDS) else "ok"
    for step in range(1, 3 if end in ("hung", "killed") else config["train"]["steps"] + 1):
        write_step(run, step, seed)
    match end:
        case "oom":
            print("[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
            return 1
        case "crashed":
            raise ValueError(f"seed {seed} is unlucky")
        case "hung":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "non_finite" | "refused":
            write_summary(run, outcome=end, problems=["tp is too large"])
            return 1
    time.sleep(0.05)
    write_summary(run, outcome="done", peak_memory_bytes_by_pp_rank=[1000 + seed])
    return 0


def write_step(run: Path, step: int, seed: int) -> None:
    """The first two steps are slow, and those after them take 100 ms and one for each seed."""
    step_time_s = 5.0 if step <= 2 else 0.1 + 0.001 * seed
    line = {"step": step, "step_time_s": step_time_s, "tokens_per_s_per_gpu": 8 / step_time_s}
    line |= {"model_tflops_per_gpu": 1.0, "mfu": None, "peak_memory_bytes": None}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def write_summary(run: Path, **values: object) -> None:
    (run / "summary.json").write_text(json.dumps(values))


if __name__ == "__main__":
    sys.exit(main())
