"""Memory that each kind of recomputation saves and time that it costs, measured on this CPU and predicted for a GPU.

    make bench NAME=recompute

The trainer's own step on one rank, bf16 on synthetic tokens. Kinds alternate round by round, since timings on a shared
machine drift; a time is the median of its rounds over that of `none`.
"""

import os
import statistics
from collections import defaultdict
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.gpu.cells import Training
from benchmarks.gpu.predict import predict
from benchmarks.gpu.training import measure_training
from benchmarks.pages.markdown import made_by, table
from dtlayout.spec.cluster import find_gpu
from dtlayout.training.devices import open_device
from dtlayout.training.rendezvous import join_ranks

KINDS = ("none", "selective", "keep-matmuls", "keep-attention", "every-2", "full")
HERE = Training(model="debug", num_blocks=4, seq_len=1024, global_batch=1, micro_batch=1)
"""Small enough for a laptop; its matmuls are narrower than those of any real model, so that attention weighs more."""
THERE = Training(model="llama3.1-8b", num_blocks=32, seq_len=8192, global_batch=4, micro_batch=1)
THERE_GPU = "h200-141g-sxm"
NUM_ROUNDS, NUM_STEPS = 5, 3


def main() -> None:
    """Print the report."""
    torch.set_num_threads(os.cpu_count() or 1)  # one rank has the machine for itself
    device = open_device("cpu", None)
    join_ranks(device, timeout_s=600)
    steps_s: dict[str, list[float]] = defaultdict(list)
    peaks: dict[str, int] = {}
    for _ in range(NUM_ROUNDS):
        for kind in KINDS:
            found = measure_training(replace(HERE, recompute=kind), device, NUM_STEPS)
            steps_s[kind].append(found.step_time_s)
            peaks[kind] = found.peak_memory_bytes
    dist.destroy_process_group()

    print("# Recomputation: what it saves and what it costs\n")
    print(f"{made_by('recompute')}. Peaks are what the storage tracker counts.")
    print(f"{HERE.subject}, sequence {HERE.seq_len}, bf16, {NUM_ROUNDS} rounds:\n")
    rows, base_s = [], statistics.median(steps_s["none"])
    for kind in KINDS:
        expected = predict(replace(HERE, recompute=kind), find_gpu("cpu")).peak_bytes / 2**20
        peak, step_s = peaks[kind] / 2**20, statistics.median(steps_s[kind])
        saved = peaks["none"] / 2**20 - peak
        numbers = f"{peak:.0f}", f"{expected:.0f}", f"{saved:.0f}", f"{step_s:.2f}", f"{step_s / base_s - 1:+.1%}"
        rows.append([kind, *numbers])
    heading = ["recompute", "peak, MiB", "predicted", "saved, MiB", "step, s", "over none"]
    print(*table(heading, rows), sep="\n")

    print(f"\nPredicted for {THERE.subject}, sequence {THERE.seq_len}, on one {THERE_GPU} (uncalibrated):\n")
    print("| recompute | peak, GiB | saved, GiB | over none |")
    print("|---|--:|--:|--:|")
    base = predict(THERE, find_gpu(THERE_GPU))
    for kind in KINDS:
        expected_there = predict(replace(THERE, recompute=kind), find_gpu(THERE_GPU))
        peak, over = expected_there.peak_bytes / 2**30, expected_there.step_time_s / base.step_time_s - 1
        print(f"| {kind} | {peak:.1f} | {base.peak_bytes / 2**30 - peak:.1f} | {over:+.1%} |")


if __name__ == "__main__":
    main()
