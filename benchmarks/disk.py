"""State on disk: the memory of a process that trains with a state of some GB in files, on this machine.

A step of our trainer with `layout.offload = "disk"` on one rank. A thread reads what the kernel counts for the process:
RssAnon, which is its own memory, and RssFile, pages of files that it has mapped, of which ours are a part. Both are
told above what there was before the model was built.
"""

import argparse
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dtlayout.base.formatting import GIB
from dtlayout.plans.init import allocate
from dtlayout.spec.batch import Batch
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import AdamW
from dtlayout.spec.precision import Precision
from dtlayout.training.build import assemble
from dtlayout.training.optimizer import build_optimizer, set_learning_rate
from dtlayout.training.step import TrainStep

BATCH = Batch(global_batch=1, seq_len=16)
_INTERVAL_S = 0.005


def read_rss() -> dict[str, int]:
    """Bytes of this process's own memory and of the files that it has mapped."""
    with open("/proc/self/status", encoding="utf-8") as status:
        lines = (line.split() for line in status if line.startswith(("RssAnon", "RssFile")))
        return {name.rstrip(":"): int(size) * 1024 for name, size, _ in lines}


@contextmanager
def highest() -> Iterator[dict[str, int]]:
    """A dictionary that has the highest values of `read_rss` when the block is over."""
    found, is_over = read_rss(), threading.Event()

    def look() -> None:
        while not is_over.wait(_INTERVAL_S):
            for name, size in read_rss().items():
                found[name] = max(found[name], size)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


def _fill(modules: Sequence[nn.Module], model: ModelShape, seed: int, device: str) -> None:
    """Give all parameters one value: what they are does not matter to memory, and drawing them takes long."""
    allocate(modules, device)
    for module in modules:
        for parameter in module.parameters():
            nn.init.constant_(parameter, 0.01)


def measure(model: ModelShape, layout: Layout, num_steps: int) -> dict[str, Any]:
    """GiB of state, of gradients, of the largest unit, and of what was in memory; seconds of each step."""
    before = read_rss()
    with highest() as built:
        assembly = assemble(
            model, BATCH, layout, Kernels(), Precision(compute="float32"), seed=0, device_type="cpu", give_weights=_fill
        )
        optimizer = build_optimizer(assembly.modules, model, AdamW(), assembly.disk)
    set_learning_rate(optimizer, 1e-4)
    step = TrainStep(assembly.runtime, optimizer, max_norm=1.0, mesh=assembly.mesh, model=model)
    tokens = torch.zeros(BATCH.global_batch, BATCH.seq_len, dtype=torch.int64)
    times = []
    with highest() as trained:
        for _ in range(num_steps):
            started_s = time.perf_counter()
            step(tokens, tokens)
            times.append(time.perf_counter() - started_s)
    units = [sum(file.nbytes for file in unit.files) for unit in assembly.disk.units] if assembly.disk else [0]
    num_trained = sum(p.numel() for module in assembly.modules for p in module.parameters())
    above = {f"{when} {name}": most[name] - before[name] for when, most in (("building", built), ("steps", trained))
             for name in most}  # fmt: skip
    sizes = {"state": sum(units), "gradients": 4 * num_trained, "largest unit": max(units), **above}
    return {**{name: round(size / GIB, 3) for name, size in sizes.items()}, "step_s": [round(s, 1) for s in times]}


def main() -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=39)
    parser.add_argument("--offload", default="disk", choices=("disk", "optimizer"))
    parser.add_argument("--folder", default="/tmp")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    model = ModelShape(
        name="disk", vocab_size=512, hidden_size=1024, num_layers=options.layers, num_heads=8, num_kv_heads=8,
        ffn_size=4096,
    )  # fmt: skip
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    dist.init_process_group("gloo")
    layout = Layout(zero=3, offload=options.offload, offload_folder=options.folder)
    print(json.dumps(measure(model, layout, options.steps)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
