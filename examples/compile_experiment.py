"""Graphs, breaks and times of layouts with kernels.compile = none, blocks, loss and model: minutes on 2 CPU ranks.

torchrun --nproc-per-node 2 examples/compile_experiment.py

Layouts, as they are printed or as choices, and fullgraph or a mode may follow: … tp2 "dp2 mb1" max-autotune fullgraph
"""

import itertools
import statistics
import sys
import time
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

import dtlayout as dl
from dtlayout.mesh.axes import dp_rank
from dtlayout.spec.kernels import Compile, CompileMode
from dtlayout.spec.layout import OpenLayout
from dtlayout.training.build import assemble

modes = [each for each in sys.argv if each in get_args(CompileMode)] or ["default"]
options: dict[str, Any] = {"compile_mode": modes[0], "compile_fullgraph": "fullgraph" in sys.argv}
names = [each for each in sys.argv[1:] if each not in (*modes, "fullgraph")] or ["dp2", "tp2"]
model, batch, precision = dl.find_preset("debug"), dl.Batch(global_batch=2, seq_len=32), dl.Precision(compute="float32")
torch.manual_seed(0)
tokens = torch.randint(model.vocab_size, (batch.global_batch, batch.seq_len + 1))


def measure(layout: dl.Layout, choice: Compile) -> list[str]:
    """Loss before any update, seconds of the first step and of later ones, graphs, graph breaks and a reason."""
    torch.compiler.reset()
    counters.clear()
    kernels = dl.Kernels(compile=choice, **options if choice != "none" else {})
    built = assemble(model, batch, layout, kernels, precision, seed=0, device_type="cpu")
    optimizer = torch.optim.AdamW(built.runtime.parameters, lr=1e-4, fused=True)
    step = dl.TrainStep(built.runtime, optimizer, max_norm=1.0, mesh=built.mesh, model=model)
    rows = tokens.chunk(layout.dp)[dp_rank(dist.get_rank(), layout)]
    times_s, losses = [time.perf_counter()], []
    for _ in range(4):
        losses.append(step(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()).loss)
        times_s.append(time.perf_counter())
    first_s, *later_s = (after - before for before, after in itertools.pairwise(times_s))
    breaks = " ".join([f"{counters['graph_break'].total()}", *counters["graph_break"]]).partition("\n")[0]
    times = f"{first_s:.2f}", f"{statistics.median(later_s):.4f}"
    return [f"{losses[0]:.4f}", *times, f"{counters['stats']['unique_graphs']}", breaks]


dist.init_process_group("gloo")
say: Any = print if dist.get_rank() == 0 else lambda *_, **__: None
say("| layout | compile | loss | first step, s | later steps, s | graphs | graph breaks |\n" + "|---" * 7 + "|")
for layout in (OpenLayout(**dl.Layout.read(name)).resolve(dist.get_world_size()) for name in names):
    found = {}
    for choice in get_args(Compile):
        row = found[choice] = measure(layout, choice)
        say(f"| {layout} | {choice} | {' | '.join(row)} |", flush=True)
    assert len({row[0] for row in found.values()}) == 1, "compiled code computes something else"
dist.destroy_process_group()
