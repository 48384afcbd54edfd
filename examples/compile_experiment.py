"""Speed of a layout with kernels.compile = none, blocks, loss and model, each trained for some steps.

torchrun --nproc-per-node 2 examples/compile_experiment.py

Without torchrun it is a world of one rank, and on CUDA it asks for more than a debug model:

python examples/compile_experiment.py --model llama3.2-1b --seq-len 4096 --global-batch 8 micro_batch=2
"""

import argparse
import gc
import os
import statistics
import time
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

import dtlayout as dl
from dtlayout.mesh.axes import dp_rank
from dtlayout.spec.kernels import Compile
from dtlayout.spec.layout import OpenLayout
from dtlayout.training.build import assemble
from dtlayout.training.devices import open_device
from dtlayout.training.rendezvous import join_ranks

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="debug", help="a preset")
parser.add_argument("--seq-len", type=int, default=32)
parser.add_argument("--global-batch", type=int, default=2)
parser.add_argument("--steps", type=int, default=4, help="at least 2; the first one compiles")
parser.add_argument("layout", nargs="*", metavar="NAME=VALUE", help="a field of Layout, e.g. tp=2")
options = parser.parse_args()

choices = dict(choice.split("=", 1) for choice in options.layout)
fields: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in choices.items()}
opened = OpenLayout(**fields)
model, batch = dl.find_preset(options.model), dl.Batch(global_batch=options.global_batch, seq_len=options.seq_len)
layout = opened.resolve(int(os.environ.get("WORLD_SIZE", "1")))
layout.check(model, batch)
has_enough = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
device = open_device("cuda" if has_enough else "cpu", None)
join_ranks(device, timeout_s=600)
say = partial(print, flush=True) if dist.get_rank() == 0 else lambda *_: None

torch.manual_seed(0)  # the same tokens on every rank, of which each data-parallel one takes its share
tokens = torch.randint(model.vocab_size, (batch.global_batch, batch.seq_len + 1))
tokens = tokens.chunk(layout.dp)[dp_rank(dist.get_rank(), layout)].to(device.type)


def synchronize() -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(choice: Compile) -> tuple[float, str]:
    """The loss before any update, and a row of the table."""
    torch.compiler.reset()
    counters.clear()
    kernels, precision = dl.Kernels(compile=choice), dl.Precision()
    built = assemble(model, batch, layout, kernels, precision, seed=0, device_type=device.type)
    optimizer = torch.optim.AdamW([p for module in built.modules for p in module.parameters()], lr=1e-4, fused=True)
    step = dl.TrainStep(built.runtime, optimizer, max_norm=1.0, mesh=built.mesh, model=model)
    times_s, losses, graphs = [], [], []
    for i in range(options.steps):
        if i == 1 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        started = time.perf_counter()
        losses.append(step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).loss)
        synchronize()
        times_s.append(time.perf_counter() - started)
        graphs.append(counters["stats"]["unique_graphs"])
    peak = f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if device.type == "cuda" else "n/a"
    steady_s, breaks = statistics.median(times_s[1:]), sum(counters["graph_break"].values())
    columns = (choice, f"{times_s[0]:.2f}", f"{steady_s:.4f}", peak, graphs[0], graphs[-1] - graphs[0], breaks)
    return losses[0], f"| {' | '.join(map(str, columns))} |"


say(f"{model.name} on {dist.get_world_size()} x {device.name}: {layout}")
say("| compile | first step, s | steady step, s | peak memory | graphs | recompiles | graph breaks |")
say("|---|--:|--:|--:|--:|--:|--:|")
first_losses = []
for choice in get_args(Compile):
    try:
        loss, row = measure(choice)
        first_losses.append(loss)
        say(row)
    except Exception as error:  # that a choice does not compile here is a result
        say(f"| {choice} | {type(error).__name__}: {str(error).partition(chr(10))[0][:100]} |")
    gc.collect()
assert max(first_losses) - min(first_losses) < 0.01, f"compiled code computes something else: {first_losses}"
dist.destroy_process_group()
