"""A step of the trainer beside one of a plain loop around Hugging Face's Llama, on this CPU, in turn.

`python -m benchmarks.speed` runs every program, number format and mode once a round, each in processes of its own, and
prints a page of medians: one process with two threads, and two data-parallel ones with a thread each.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from dtlayout.batch import Batch
from dtlayout.device import Device
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.model_shape import ModelShape
from dtlayout.optimizers import AdamW
from dtlayout.precision import Precision
from dtlayout.training.devices import join_ranks, open_device

MODEL = ModelShape(
    name="bench", hidden_size=256, num_layers=8, num_heads=8, num_kv_heads=8, ffn_size=768, vocab_size=2048,
    tied_embeddings=False,
)  # fmt: skip
SEQ_LEN, ROWS = 512, 4
"""Tokens of a sequence, and sequences of a rank in a step."""
WARM_UP = 3
"""Steps that are not counted: the first compiles, the second has the optimizer's state."""
PROGRAMS = {1: ("dtlayout", "transformers"), 2: ("dtlayout", "transformers, FSDP2", "transformers, DDP")}
FORMATS, MODES = ("float32", "bfloat16"), ("eager", "compiled")
Step = Callable[[Tensor, Tensor], float]


def make_own_step(number_format: str, mode: str) -> Step:
    """A step as train.py does it."""
    from dtlayout.training.build import assemble
    from dtlayout.training.optimizer import build_optimizer, set_learning_rate
    from dtlayout.training.step import TrainStep

    world_size = dist.get_world_size()
    batch, layout = (
        Batch(global_batch=ROWS * world_size, seq_len=SEQ_LEN),
        Layout(micro_batch=ROWS, dp_shard=world_size),
    )
    precision = Precision(compute=number_format)
    kernels = Kernels(attention="auto", compile="blocks" if mode == "compiled" else "none")
    kernels, _ = kernels.resolve(precision, Device("cpu"))
    assembly = assemble(MODEL, batch, layout, kernels, precision, seed=0, device_type="cpu")
    optimizer = build_optimizer(assembly.modules, MODEL, AdamW())
    set_learning_rate(optimizer, 1e-3)
    step = TrainStep(assembly.runtime, optimizer, max_norm=1.0, mesh=assembly.mesh, aliases=MODEL.aliases)
    return lambda tokens, targets: step(tokens, targets).loss


def make_plain_step(number_format: str, mode: str, sharding: str) -> Step:
    """A step of the loop that one writes around `LlamaForCausalLM`: autocast for bf16, clipping, fused AdamW."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=MODEL.hidden_size, num_hidden_layers=MODEL.num_layers, num_attention_heads=MODEL.num_heads,
            num_key_value_heads=MODEL.num_kv_heads, intermediate_size=MODEL.ffn_size, vocab_size=MODEL.vocab_size,
            tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa",
        )
    )  # fmt: skip
    if sharding == "FSDP2":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    trained = DistributedDataParallel(model) if sharding == "DDP" else model
    run = torch.compile(trained) if mode == "compiled" else trained
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(tokens: Tensor, _: Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16) if number_format == "bfloat16" else nullcontext():
            loss = run(input_ids=tokens, labels=tokens).loss  # which it shifts itself
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def work(program: str, number_format: str, mode: str, num_steps: int) -> None:
    """Print the seconds of each step, on rank 0."""
    join_ranks(open_device("cpu", None), timeout_s=600)
    torch.set_num_threads(2 // dist.get_world_size())
    name, _, sharding = program.partition(", ")
    step = make_own_step(number_format, mode) if name == "dtlayout" else make_plain_step(number_format, mode, sharding)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(MODEL.vocab_size, (ROWS, SEQ_LEN + 1), generator=generator)
    seconds = []
    for _ in range(WARM_UP + num_steps):
        started = time.perf_counter()
        step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        seconds.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        print(json.dumps(seconds[WARM_UP:]))
    dist.destroy_process_group()


def measure(world_size: int, program: str, number_format: str, mode: str, num_steps: int) -> float:
    """The median step of fresh processes, in seconds."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"] if world_size > 1 else []
    )
    command = [sys.executable, *launcher, "-m", "benchmarks.speed", "--work", program, number_format, mode]
    done = subprocess.run(
        [*command, "--steps", str(num_steps)], capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "OMP_NUM_THREADS": str(2 // world_size)},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return statistics.median(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Work, where --work says so; else measure everything in rounds and print the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", nargs=3, metavar=("PROGRAM", "FORMAT", "MODE"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.work:
        work(*options.work, options.steps)
        return
    found: dict[tuple[int, str, str, str], list[float]] = defaultdict(list)
    for _, number_format, mode, world_size in product(range(options.rounds), FORMATS, MODES, PROGRAMS):
        for program in PROGRAMS[world_size]:
            seconds = measure(world_size, program, number_format, mode, options.steps)
            found[world_size, number_format, program, mode].append(seconds)
            print(world_size, number_format, program, mode, f"{1e3 * seconds:.0f} ms", file=sys.stderr, flush=True)
    write_page({key: statistics.median(values) for key, values in found.items()}, options)


def write_page(medians: dict[tuple[int, str, str, str], float], options: argparse.Namespace) -> None:
    """The page, on stdout."""
    print("# A step beside Hugging Face's Llama, on this CPU\n")
    print(
        f"`make bench`: torch {torch.__version__}, {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} cores; {SEQ_LEN} tokens x {ROWS} sequences a rank, hidden size {MODEL.hidden_size}, "
        f"{MODEL.num_layers} blocks; medians of {options.rounds} alternating rounds of {options.steps} steps.\n"
    )
    print(
        "| ranks x threads | format | program | eager, ms | compiled, ms | its faster one, of transformers' fastest |"
    )
    print("|---|---|---|---|---|---|")
    for world_size, number_format in product(PROGRAMS, FORMATS):
        best = {p: min(medians[world_size, number_format, p, m] for m in MODES) for p in PROGRAMS[world_size]}
        theirs = min(seconds for program, seconds in best.items() if program != "dtlayout")
        for program in PROGRAMS[world_size]:
            times = " | ".join(f"{1e3 * medians[world_size, number_format, program, mode]:.0f}" for mode in MODES)
            speed = f"x {theirs / best[program]:.2f}"
            print(f"| {world_size} x {2 // world_size} | {number_format} | {program} | {times} | {speed} |")


if __name__ == "__main__":
    main()
