"""A step of the trainer beside one of a plain loop around Hugging Face's Llama, on this CPU, in turn.

`python -m benchmarks.speed` runs every program, number format and mode once a round, each in processes of its own, and
prints a page of medians: one process with two threads, and two data-parallel ones with a thread each. Then it times
what lies around the steps of a run: the start of 8 ranks, and fetching batches and writing metrics.
"""

import argparse
import json
import os
import platform
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtlayout.base.process import leave
from dtlayout.spec.batch import Batch
from dtlayout.spec.device import Device
from dtlayout.spec.kernel_records import KernelRequest
from dtlayout.spec.kernels import Kernels, OpenKernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import AdamW
from dtlayout.spec.precision import Format, Precision
from dtlayout.training.devices import open_device
from dtlayout.training.rendezvous import join_ranks

MODEL = ModelShape(
    name="bench", hidden_size=256, num_layers=8, num_heads=8, num_kv_heads=8, ffn_size=768, vocab_size=2048,
    tied_embeddings=False,
)  # fmt: skip
SEQ_LEN, ROWS = 512, 4
"""Tokens of a sequence, and sequences of a rank in a step."""
WARM_UP = 3
"""Steps that are not counted: the first compiles, the second has the optimizer's state."""
BARE = "dtlayout, bare module"
PROGRAMS = {1: ("dtlayout", BARE, "transformers"), 2: ("dtlayout", "transformers, FSDP2", "transformers, DDP")}
PARTS = {
    "matmuls": {"aten::mm"},
    "attention": {
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    },
}
"""Part of a step with PyTorch's flash kernel → the profiler's names of it. Blockwise attention is not profiled: it is
thousands of operators, and the profiler takes time of its own for each of them."""
FORMATS: tuple[Format, ...] = ("float32", "bfloat16")
MODES = ("eager", "compiled")
Step = Callable[[Tensor, Tensor], float]


def choose_kernels(model: ModelShape, precision: Precision, mode: str, attention: str = "auto") -> Kernels:
    """The fastest on a CPU, but for what is asked for."""
    need = KernelRequest(device=Device("cpu"), compute=precision.compute, head_width=model.head_width)
    asked = OpenKernels(attention=attention, compile="blocks" if mode == "compiled" else "none")
    return asked.resolve(need).kernels


def make_own_step(
    model: ModelShape, layout: Layout, number_format: Format, mode: str, attention: str = "auto"
) -> Step:  # fmt: skip
    """A step as train.py does it."""
    from dtlayout.training.build import assemble
    from dtlayout.training.optimizer import build_optimizer, set_learning_rate
    from dtlayout.training.step import TrainStep

    batch, precision = Batch(global_batch=ROWS * layout.dp, seq_len=SEQ_LEN), Precision(compute=number_format)
    kernels = choose_kernels(model, precision, mode, attention)
    assembly = assemble(model, batch, layout, kernels, precision, seed=0, device_type="cpu")
    optimizer = build_optimizer(assembly.modules, model, AdamW())
    set_learning_rate(optimizer, 1e-3)
    step = TrainStep(assembly.runtime, optimizer, max_norm=1.0, mesh=assembly.mesh, model=model)
    return lambda tokens, targets: step(tokens, targets).loss


def make_bare_step(number_format: Format, mode: str) -> Step:
    """Our module without mesh, plan and runtime, in the same loop as transformers'."""
    from dtlayout.pipelining.partition import StageSlice
    from dtlayout.pipelining.stage import build_stage
    from dtlayout.plans.init import initialize

    precision, batch = Precision(compute=number_format), Batch(global_batch=ROWS, seq_len=SEQ_LEN)
    whole = StageSlice(layers=range(MODEL.num_layers), embedding=True, head=True)
    model = build_stage(MODEL, choose_kernels(MODEL, precision, mode), precision, batch, whole)
    initialize([model], MODEL, 0, "cpu")
    run = torch.compile(model) if mode == "compiled" else model
    return make_loop(
        model, number_format, lambda tokens, targets: run(tokens, targets=targets, num_targets=targets.numel())
    )


def make_plain_step(number_format: Format, mode: str, sharding: str) -> Step:
    """A step of the loop that one writes around `LlamaForCausalLM`."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=MODEL.hidden_size, num_hidden_layers=MODEL.num_layers, num_attention_heads=MODEL.num_heads,
            num_key_value_heads=MODEL.num_kv_heads, intermediate_size=MODEL.ffn_size, vocab_size=MODEL.vocab_size,
            tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa",  # type: ignore[call-arg]
        )
    )  # fmt: skip
    if sharding == "FSDP2":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    trained = DistributedDataParallel(model) if sharding == "DDP" else model
    run = torch.compile(trained) if mode == "compiled" else trained
    return make_loop(model, number_format, lambda tokens, _: run(input_ids=tokens, labels=tokens).loss)  # it shifts


def make_loop(model: nn.Module, number_format: Format, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Step:
    """A training loop as people write it around a module: autocast for bf16, clipping, fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16) if number_format == "bfloat16" else nullcontext():
            loss = loss_of(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


@contextmanager
def joined() -> Iterator[None]:
    """A block in which this process is one of the ranks that were started, with its share of two threads."""
    join_ranks(open_device("cpu", None), timeout_s=600)
    torch.set_num_threads(2 // dist.get_world_size())
    yield
    dist.destroy_process_group()


def profile_step(number_format: Format, num_steps: int) -> None:
    """Print the seconds of an eager step by what they are spent on."""
    step = make_own_step(MODEL, Layout(micro_batch=ROWS), number_format, "eager", attention="sdpa-flash")
    tokens = torch.randint(MODEL.vocab_size, (ROWS, SEQ_LEN))
    for _ in range(WARM_UP):
        step(tokens, tokens)
    with torch.profiler.profile() as profile:
        started = time.perf_counter()
        for _ in range(num_steps):
            step(tokens, tokens)
        whole_s = time.perf_counter() - started
    parts = dict.fromkeys(PARTS, 0.0)
    for event in profile.key_averages():
        for part, names in PARTS.items():
            parts[part] += event.cpu_time_total / 1e6 if event.key in names else 0.0
    print(json.dumps([*(seconds / num_steps for seconds in parts.values()), whole_s / num_steps]))


def work(program: str, number_format: Format, mode: str, num_steps: int) -> None:
    """Print the seconds of each step, on rank 0."""
    if program == "dtlayout":
        layout = Layout(micro_batch=ROWS, dp_shard=dist.get_world_size())
        step = make_own_step(MODEL, layout, number_format, mode)
    elif program == BARE:
        step = make_bare_step(number_format, mode)
    else:
        step = make_plain_step(number_format, mode, sharding=program.partition(", ")[2])
    print_seconds(step, MODEL.vocab_size, dist.get_rank(), num_steps)


def print_seconds(step: Step, vocab_size: int, seed: int, num_steps: int) -> None:
    """Print the seconds of each step of the same random batch, on rank 0."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (ROWS, SEQ_LEN + 1), generator=generator)
    seconds = []
    for _ in range(WARM_UP + num_steps):
        started = time.perf_counter()
        step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        seconds.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        print(json.dumps(seconds[WARM_UP:]))


def measure(module: str, world_size: int, work: Sequence[str], num_steps: int) -> float:
    """The median step of fresh processes of a module, which get `work` behind --work, in seconds."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"] if world_size > 1 else []
    )
    command = [sys.executable, *launcher, "-m", module, "--work", *work, "--steps", str(num_steps)]
    printed = execute(command, num_threads=2 // world_size)
    return statistics.median(json.loads(printed.splitlines()[-1]))


def execute(command: Sequence[str], num_threads: int) -> str:
    """The output of a command; SystemExit with its words if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def debug_run(folder: str, num_steps: int) -> list[str]:
    """The run that `make train` starts, in a folder."""
    options = {"train.steps": num_steps, "train.run_folder": folder, "checkpoint.save": "false"}
    options["optimizer.decay_steps"] = 140  # of which these are the first
    return ["train.py", "configs/debug.toml", *(f"--{key}={value}" for key, value in options.items())]


def time_start(num_ranks: int) -> float:
    """Seconds from the command to the end of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        started = time.time()
        execute([sys.executable, *launcher, *debug_run(folder, num_steps=1)], num_threads=1)
        return Path(folder, "metrics.jsonl").stat().st_mtime - started


def time_around(num_steps: int) -> float:
    """Share of a run's loop on one rank that is not in its steps: batches, learning rate, metrics, the line printed."""
    with tempfile.TemporaryDirectory() as folder:
        profile = str(Path(folder, "profile"))
        _, *alone = [*debug_run(folder, num_steps), "--layout.pp=1", "--layout.tp=1"]
        # train.py leaves without an exit of Python's, at which a profile would be written.
        profiled = "import cProfile, sys, dtlayout.launch as run; cProfile.run('run.main(sys.argv[2:])', sys.argv[1])"
        execute([sys.executable, "-c", profiled, profile, *alone], num_threads=1)
        seconds = {(Path(file).name, name): found[3] for (file, _, name), found in pstats.Stats(profile).stats.items()}  # type: ignore[attr-defined]
        in_steps = seconds["step.py", "launch"] + seconds["step.py", "wait"]
        return 1 - in_steps / seconds["run.py", "run_steps"]


def add_rounds(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how much is measured."""
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)


def main() -> None:
    """Work, where --work says so; else measure everything in rounds and print the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", nargs=3, metavar=("PROGRAM", "FORMAT", "MODE"))
    parser.add_argument("--profile", choices=FORMATS)
    add_rounds(parser)
    options = parser.parse_args()
    if options.work:
        with joined():
            program, number_format, mode = options.work
            work(program, number_format, mode, options.steps)
        return
    if options.profile:
        with joined():
            profile_step(options.profile, options.steps)
        return
    found: dict[tuple[int, str, str, str], list[float]] = defaultdict(list)
    for _, number_format, mode, world_size in product(range(options.rounds), FORMATS, options.modes, PROGRAMS):
        for program in PROGRAMS[world_size]:
            seconds = measure("benchmarks.speed", world_size, [program, number_format, mode], options.steps)
            found[world_size, number_format, program, mode].append(seconds)
            print(world_size, number_format, program, mode, f"{1e3 * seconds:.0f} ms", file=sys.stderr, flush=True)
    write_page({key: statistics.median(values) for key, values in found.items()}, options)


def write_page(medians: dict[tuple[int, str, str, str], float], options: argparse.Namespace) -> None:
    """The page, on stdout."""
    print("# A step beside Hugging Face's Llama, on this CPU\n")
    print(
        f"`make bench NAME=speed`: torch {torch.__version__}, {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} cores; {SEQ_LEN} tokens x {ROWS} sequences a rank, hidden size {MODEL.hidden_size}, "
        f"{MODEL.num_layers} blocks; medians of {options.rounds} alternating round(s) of {options.steps} steps.\n"
    )
    modes = [f"{mode}, ms" for mode in options.modes]
    columns = ["ranks x threads", "format", "program", *modes, "its fastest, of transformers' fastest"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for world_size, number_format in product(PROGRAMS, FORMATS):
        best = {p: min(medians[world_size, number_format, p, m] for m in options.modes) for p in PROGRAMS[world_size]}
        theirs = min(seconds for program, seconds in best.items() if program.startswith("transformers"))
        for program in PROGRAMS[world_size]:
            times = " | ".join(
                f"{1e3 * medians[world_size, number_format, program, mode]:.0f}" for mode in options.modes
            )
            speed = f"x {theirs / best[program]:.2f}"
            print(f"| {world_size} x {2 // world_size} | {number_format} | {program} | {times} | {speed} |")
    print(
        "\n| eager step with PyTorch's flash kernel | matmuls, ms | attention, ms | all else, ms |\n|---|---|---|---|"
    )
    for number_format in FORMATS:
        command = [sys.executable, "-m", "benchmarks.speed", "--profile", number_format]
        *parts, whole_s = json.loads(execute([*command, "--steps", "5"], num_threads=2).splitlines()[-1])
        times = " | ".join(f"{1e3 * seconds:.0f}" for seconds in (*parts, whole_s - sum(parts)))
        print(f"| {number_format} | {times} |")
    print(f"\n8 ranks of `configs/debug.toml`, from the command to the end of the first step: {time_start(8):.1f} s.")
    print(f"One rank of it: {time_around(40):.1%} of the loop is spent on batches, metrics and what it prints.")
    print("\nWhat it was before, and what was tried: [speed_history.md](speed_history.md).")


if __name__ == "__main__":
    main()
    leave(0)
