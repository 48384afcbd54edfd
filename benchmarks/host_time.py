"""The host's time for a layer of one microbatch, with tensors so small that nothing else takes any; as Markdown.

    make bench-host

What the host does beside computing: Python, autograd and the dispatch of operators, FSDP2's hooks, starting
collectives. The trainer's own runtime steps this process as one rank of a fake process group, whose collectives send
nothing; what one layer adds is the difference between a deep model and a shallow one. On a GPU the tensors take it less
time than the host needs to start them, so that the figures are the host's there too.
"""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone

import torch

from dtlayout.batch import Batch
from dtlayout.dryrun.world import fake_world
from dtlayout.kernels import Compile, Kernels
from dtlayout.layout import Layout
from dtlayout.model_shape import ModelShape
from dtlayout.precision import Precision
from dtlayout.training.build import assemble

SHAPE = ModelShape(
    name="tiny", hidden_size=64, num_layers=2, num_heads=8, num_kv_heads=8, ffn_size=128, vocab_size=128
)  # fmt: skip
SEQ_LEN, NUM_MICROBATCHES = 16, 4
NUM_LAYERS = (2, 10)
"""Of the shallow and the deep model."""
NUM_STEPS = 12
"""Of which the fastest counts: whatever else the machine does only adds to it."""
LAYOUTS = {
    "one rank": Layout(),
    "dp 8": Layout(dp_shard=8),
    "tp 8, sequence parallel": Layout(tp=8),
    "tp 8": Layout(tp=8, sequence_parallel=False),
    "tp 8, sequence parallel, selective recomputation": Layout(tp=8, recompute="selective"),
    "tp 8, sequence parallel, full recomputation": Layout(tp=8, recompute="full"),
}


def measure_host_s(layout: Layout, compile: Compile = "none", device_type: str = "cpu") -> float:
    """Seconds of host time for one layer of one microbatch, forward and backward, on rank 0 of a layout without pp."""
    shallow, deep = (_time_step(layout, compile, device_type, num_layers) for num_layers in NUM_LAYERS)
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

        def step() -> None:
            assembly.runtime.step(rows, targets=rows, num_targets=1.0)

        times_s = []
        for _ in range(NUM_STEPS):
            times_s.append(_time(step, device_type))
            for parameter in assembly.modules[0].parameters():
                parameter.grad = None
    return min(times_s)


def _time(step: Callable[[], None], device_type: str) -> float:
    """Seconds until the host is through; a GPU begins without work."""
    if device_type == "cuda":
        torch.cuda.synchronize()
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> None:
    """Print the report."""
    torch.set_num_threads(1)
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    print("# The host's time for a layer\n")
    print(
        f"{datetime.now(timezone.utc):%Y-%m-%d}, torch {torch.__version__}, {os.cpu_count()} CPU cores, "
        f"{platform.machine()}, {device_type}. `make bench-host`\n"
    )
    print(
        f"Milliseconds for one layer of one microbatch, forward and backward: what {NUM_LAYERS[1] - NUM_LAYERS[0]} more\n"
        f"layers add to the fastest of {NUM_STEPS} steps of {NUM_MICROBATCHES} microbatches, hidden "
        f"{SHAPE.hidden_size}, sequence {SEQ_LEN}, bf16, beside a fake process\ngroup.\n"
    )
    print("| layout | eager | compiled blocks |")
    print("|---|--:|--:|")
    for name, layout in LAYOUTS.items():
        cells = [f"{1e3 * measure_host_s(layout, compile, device_type):.2f}" for compile in ("none", "blocks")]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
