"""The host's time for a layer of one microbatch, with tensors so small that nothing else takes any; as Markdown.

    make bench NAME=host_time

What the host does beside computing: Python, autograd and the dispatch of operators, FSDP2's hooks, starting
collectives. The trainer's own runtime steps this process as one rank of a fake process group, whose collectives send
nothing; what one layer adds is the difference between a deep model and a shallow one. On a GPU the tensors take it less
time than the host needs to start them, so that the figures are the host's there too.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from benchmarks.pages.markdown import made_by
from dtlayout.dryrun.world import fake_world
from dtlayout.plans.plan import TensorStyle
from dtlayout.plans.styles import STYLES
from dtlayout.spec.batch import Batch
from dtlayout.spec.kernels import Compile, Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import Precision
from dtlayout.training.build import assemble

SHAPE = ModelShape(name="tiny", hidden_size=64, num_layers=2, num_heads=8, num_kv_heads=8, ffn_size=128, vocab_size=128)
SEQ_LEN, NUM_MICROBATCHES = 16, 4
NUM_LAYERS = (2, 10)
"""Layers of the shallow and of the deep model."""
NUM_STEPS = 12
"""Timed steps. The fastest counts, since all else that the machine does only adds to it."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "sequence parallel": {},
    "selective recomputation": {"recompute": "selective"},
    "full recomputation": {"recompute": "full"},
    "without sequence parallelism": {"sequence_parallel": False},
}
"""At tp 1 and 8."""
COMPILED: tuple[Compile, ...] = ("none", "blocks")
_INPUTS: dict[str, Any] = {"desired_input_layouts": (Replicate(),), "use_local_output": False}
TORCH_STYLES: dict[TensorStyle, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "rowwise-scatter": lambda: RowwiseParallel(output_layouts=Shard(1)),
    "input": lambda: PrepareModuleInput(input_layouts=(Replicate(),), **_INPUTS),
    "input-gather": lambda: PrepareModuleInput(input_layouts=(Shard(1),), **_INPUTS),
    "sequence": lambda: SequenceParallel(use_local_output=True),
}
"""torch's own, whose modules compute on DTensors."""


def measure_host_s(tp: int, compile: Compile = "none", device_type: str = "cpu", **layout: Any) -> float:
    """Seconds of host time for one layer of one microbatch, forward and backward, on a rank of tp.

    `layout` are other fields of it, but no pp. The process must have no process group.
    """
    plan = Layout(tp=tp, **layout)
    shallow, deep = (_time_step(plan, compile, device_type, num_layers) for num_layers in NUM_LAYERS)
    return (deep - shallow) / (NUM_LAYERS[1] - NUM_LAYERS[0]) / NUM_MICROBATCHES


def _time_step(layout: Layout, compile: Compile, device_type: str, num_layers: int) -> float:
    """Seconds of a step's forwards and backwards without the update, the fastest of some."""
    model = replace(SHAPE, num_layers=num_layers)
    batch = Batch(global_batch=NUM_MICROBATCHES * layout.micro_batch * layout.dp, seq_len=SEQ_LEN)
    kernels = Kernels(compile=compile)
    layout.check(model, batch)
    torch._dynamo.reset()
    with fake_world(0, layout.world_size):
        assembly = assemble(model, batch, layout, kernels, Precision(), seed=0, device_type=device_type)
        rows = torch.randint(model.vocab_size, (NUM_MICROBATCHES * layout.micro_batch, SEQ_LEN), device=device_type)
        times_s = []
        for _ in range(NUM_STEPS):
            if device_type == "cuda":
                torch.cuda.synchronize()
            start_s = time.process_time()  # not what others do meanwhile on a shared machine
            assembly.runtime.step(rows, targets=rows, num_targets=1.0)
            times_s.append(time.process_time() - start_s)
            for parameter in assembly.modules[0].parameters():
                parameter.grad = None
    return min(times_s)


def main() -> None:
    """Print the report."""
    torch.set_num_threads(1)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    print("# The host's time for a layer\n")
    print(f"{made_by('host_time')}, {device_type}.\n")
    print(
        f"Milliseconds of the processor for one layer of one microbatch, forward and backward: what\n"
        f"{NUM_LAYERS[1] - NUM_LAYERS[0]} more layers add to the fastest of {NUM_STEPS} steps of {NUM_MICROBATCHES} "
        f"microbatches. Hidden {SHAPE.hidden_size}, sequence {SEQ_LEN}, bf16, a fake process group.\n"
        f"Beside it the same with torch's own tensor-parallel styles, whose modules compute on DTensors.\n"
    )
    print("| | tp 1 | tp 8 | ratio | tp 8 by torch's styles | tp 1, compiled blocks | tp 8, compiled blocks |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, layout in LAYOUTS.items():
        kinds = product(COMPILED, (1, 8))
        alone_s, split_s, *compiled_s = (measure_host_s(tp, kind, device_type, **layout) for kind, tp in kinds)
        with patch.dict(STYLES, TORCH_STYLES):
            torch_s = measure_host_s(8, device_type=device_type, **layout)
        times = [f"{1e3 * s:.2f}" for s in (alone_s, split_s, torch_s, *compiled_s)]
        print(f"| {' | '.join([name, *times[:2], f'×{split_s / alone_s:.2f}', *times[2:]])} |", flush=True)


if __name__ == "__main__":
    main()
