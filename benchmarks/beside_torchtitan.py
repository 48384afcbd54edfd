"""A step of the trainer beside one of torchtitan's, on two ranks of this CPU, in turn.

    python -m benchmarks.beside_torchtitan [--rounds 3] [--steps 20]

Both train torchtitan's Llama "debugmodel" with the same batches, each in processes of its own: split over dp with
FSDP2, over tp, and over pp with 1F1B. torchtitan is not among what this project installs. Where it is missing the page
says so; PYTHONPATH may name a folder of `pip install --no-deps --target`. It is written for GPUs: `make_titan_step`
says what stands in for what a CPU lacks, all outside of the steps.
"""

import argparse
import importlib.util
import os
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.pages.markdown import table
from benchmarks.speed import FORMATS, ROWS, SEQ_LEN, Step, add_rounds, joined, make_own_step, measure, print_seconds
from dtlayout.base.process import leave
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import Format

MODEL = ModelShape(
    name="debugmodel", hidden_size=256, num_layers=6, num_heads=16, num_kv_heads=16, ffn_size=768, vocab_size=2048,
    rope_theta=500_000.0, tied_embeddings=False,
)  # fmt: skip
"""torchtitan's "debugmodel"."""
LAYOUTS = {
    "dp2": Layout(micro_batch=ROWS, dp_shard=2, zero=3),
    "tp2": Layout(micro_batch=ROWS, tp=2, sequence_parallel=True),
    "pp2": Layout(micro_batch=1, pp=2, schedule="1f1b"),
}
PROGRAMS = ("dtlayout", "torchtitan")


class _Absent:
    """The config of a part of torchtitan's trainer that its steps do without: data, metrics and checkpoints."""

    enable = create_seed_checkpoint = False
    interval = 1

    def build(self, **options: Any) -> Any:
        """Something that takes every call; it is asked whether to log, and says no."""
        part = mock.MagicMock()
        part.should_log.return_value = False
        part.device_memory_monitor.device_name = platform.machine()
        part.device_memory_monitor.get_peak_stats.return_value = mock.Mock(max_reserved_gib=0.0, max_reserved_pct=0.0)
        return part


def make_titan_step(layout: Layout, number_format: Format, mode: str) -> Step:
    """A step of torchtitan's `Trainer`, which takes the CPU for its device.

    Attention is SDPA's, since FlexAttention has no backward on a CPU. Gradients are summed by SUM, which gloo has. The
    schedule is called as torch's releases have it. What is not measured is left out: see `_Absent`.
    """
    with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):
        from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
        from torchtitan.components.optimizer import default_adamw
        from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
        from torchtitan.models.common.attention import ScaledDotProductAttention
        from torchtitan.models.llama3 import model_registry
        from torchtitan.trainer import Trainer
    from torch.distributed.fsdp import FSDPModule

    described = model_registry("debugmodel", attn_backend="flex")
    for layer in described.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = Trainer.Config(
        model_spec=described,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=MODEL.vocab_size)),
        optimizer=default_adamw(lr=1e-3),
        training=TrainingConfig(
            local_batch_size=ROWS, seq_len=SEQ_LEN, steps=1_000, disable_cuda_graphs=True,
            mixed_precision_param=number_format,
        ),
        parallelism=ParallelismConfig(
            data_parallel_shard_degree=layout.dp, tensor_parallel_degree=layout.tp,
            pipeline_parallel_degree=layout.pp, pipeline_parallel_schedule="1F1B", spmd_backend="partial_dtensor",
        ),
        activation_checkpoint=None,
        compile=CompileConfig(enable=mode == "compiled"),
    )  # fmt: skip
    for part in ("tokenizer", "dataloader", "checkpoint", "metrics"):
        setattr(config, part, _Absent())
    trainer = Trainer(config)
    for module in trainer.model_parts:
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.set_force_sum_reduction_for_comms(True)
    if layout.pp > 1:
        trainer.pp_forward_backward_step = lambda **given: _run_schedule(trainer, **given)

    def step(tokens: Tensor, targets: Tensor) -> float:
        rows = zip(tokens.split(layout.micro_batch), targets.split(layout.micro_batch), strict=True)
        trainer.train_step(iter([({"input": inputs}, labels) for inputs, labels in rows]))
        return 0.0

    return step


def _run_schedule(
    trainer: Any, input_dict_mbs: Sequence[dict[str, Tensor]], label_mbs: Sequence[Tensor], global_valid_tokens: Tensor
) -> Tensor:
    """Forward and backward of all microbatches of torchtitan's schedule, with the arguments of torch's releases."""
    schedule = trainer.pp_schedule
    schedule._loss_fn = lambda out, labels: trainer.loss_fn(out, labels, global_valid_tokens)[0]
    inputs = (torch.cat([each["input"] for each in input_dict_mbs]),) if trainer.pp_has_first_stage else ()
    target = {"target": torch.cat([*label_mbs])} if trainer.pp_has_last_stage else {}
    with trainer.train_context():
        schedule.step(*inputs, **target)
    return torch.zeros(())


def work(program: str, name: str, number_format: Format, mode: str, num_steps: int) -> None:
    """Print the seconds of each step, on rank 0."""
    layout = LAYOUTS[name]
    if program == "dtlayout":
        step = make_own_step(MODEL, layout, number_format, mode)
    else:
        step = make_titan_step(layout, number_format, mode)
    print_seconds(step, MODEL.vocab_size, dist.get_rank() if layout.dp > 1 else 0, num_steps)


def print_page(options: argparse.Namespace) -> None:
    """The page, after all is measured in rounds."""
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for _, number_format, mode, name in product(range(options.rounds), FORMATS, options.modes, LAYOUTS):
        for program in PROGRAMS:
            asked = [program, name, number_format, mode]
            seconds = measure("benchmarks.beside_torchtitan", 2, asked, options.steps)
            found[name, number_format, mode, program].append(seconds)
            print(name, number_format, mode, program, f"{1e3 * seconds:.0f} ms", file=sys.stderr, flush=True)
    print("# A step beside torchtitan's, on this CPU\n")
    print(
        f"`make bench NAME=beside_torchtitan`, with `--rounds {options.rounds} --steps {options.steps}`: torch "
        f"{torch.__version__}, torchtitan {version('torchtitan')}, {platform.machine()}, {os.cpu_count()} cores.\n"
        f"torchtitan's debugmodel on two ranks of a thread each, {SEQ_LEN} tokens x {ROWS} sequences a rank of dp;\n"
        f"medians of {options.rounds} alternating round(s).\n"
    )
    rows = list(_list_rows({key: statistics.median(values) for key, values in found.items()}, options.modes))
    print(
        *table(["layout", "format", "mode", *(f"{each}, ms" for each in PROGRAMS), "speed beside"], rows, 3), sep="\n"
    )


def _list_rows(medians: dict[tuple[str, ...], float], modes: Sequence[str]) -> Iterator[list[str]]:
    for name, number_format in product(LAYOUTS, FORMATS):
        seconds = {mode: [medians[name, number_format, mode, program] for program in PROGRAMS] for mode in modes}
        if len(modes) > 1:
            seconds["the faster"] = [min(of_program) for of_program in zip(*seconds.values(), strict=True)]
        for mode, (ours, theirs) in seconds.items():
            yield [name, number_format, mode, f"{1e3 * ours:.0f}", f"{1e3 * theirs:.0f}", f"x {theirs / ours:.2f}"]


def main() -> None:
    """Work, where --work says so; else measure everything in rounds and print the page."""
    parser = argparse.ArgumentParser(prog="benchmarks.beside_torchtitan")
    parser.add_argument("--work", nargs=4, metavar=("PROGRAM", "LAYOUT", "FORMAT", "MODE"))
    add_rounds(parser)
    options = parser.parse_args()
    if options.work:
        with joined():
            program, name, number_format, mode = options.work
            work(program, name, number_format, mode, options.steps)
    elif importlib.util.find_spec("torchtitan") is None:
        raise SystemExit("torchtitan is not installed: nothing was measured")
    else:
        print_page(options)


if __name__ == "__main__":
    main()
    leave(0)
