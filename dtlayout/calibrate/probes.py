"""Probes: steps of the trainer on small models, from which the cost model learns the host's times.

Tiny models are nearly all host: their layers, microbatches, messages and kinds of recomputation are varied one by one.
Wider ones on a CPU show the time of elementwise kernels there.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from statistics import median

import torch
import torch.distributed as dist

from dtlayout.calibrate.clock import ProcessorWatch
from dtlayout.calibrate.measured import ProbeTime
from dtlayout.calibrate.measures import list_formats
from dtlayout.spec.batch import Batch
from dtlayout.spec.device import Device
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import AdamW
from dtlayout.spec.precision import Precision
from dtlayout.training.build import assemble
from dtlayout.training.optimizer import build_optimizer
from dtlayout.training.step import TrainStep

_ROUNDS, _WARM_UP_STEPS, _STEPS = 3, 1, 3
_WIDE = ((256, 2048, 256, 2), (384, 512, 128, 2), (128, 8192, 128, 2), (256, 512, 256, 1), (160, 512, 128, 1))
"""Width, vocabulary, length and micro-batch of models whose computing takes so long that Python's time matters less."""


def measure_probes(device: Device) -> Iterator[ProbeTime]:
    """Time steps on all ranks, round after round, since a machine may be slower at one time than at another."""
    device_type, kernels = device.type, Kernels()
    precision = Precision(compute=list_formats(device)[0])
    plan = [
        (model, Batch(global_batch=layout.dp * layout.micro_batch * m, seq_len=seq_len), layout)
        for model, layout, seq_len, m in plan_probes(dist.get_world_size(), device_type)
    ]
    steps_s: list[list[float]] = [[] for _ in plan]
    for _, (found, probe) in product(range(_ROUNDS), zip(steps_s, plan, strict=True)):
        found += _time_steps(*probe, kernels, precision, device_type)
    for found, (model, batch, layout) in zip(steps_s, plan, strict=True):
        yield ProbeTime(
            model=model, batch=batch, layout=layout, kernels=kernels, precision=precision, seconds=median(found)
        )


def plan_probes(world: int, device_type: str) -> Iterator[tuple[ModelShape, Layout, int, int]]:
    """Model, layout, sequence length and number of microbatches of each probe on so many ranks."""
    layers = max(4, world)
    few, many = _make_model(layers // 2), _make_model(layers)
    whole = Layout(dp_shard=world)
    splits = [whole, Layout(dp_shard=world // 2, tp=2)] if world % 2 == 0 else [whole]
    for layout in splits:
        if layout.tp == 1 or layers <= 8:
            yield few, layout, 16, 1
        yield many, layout, 16, 1
        yield many, layout, 16, 4
        yield many, replace(layout, recompute="full"), 16, 2
        yield many, replace(layout, recompute="selective"), 16, 2
    if world > 1:
        yield many, replace(whole, zero=3), 16, 2
        yield many, Layout(pp=world), 16, 2 * world
    if world % 2 == 0 and world > 2:
        yield many, Layout(dp_shard=world // 2, pp=2), 16, 4
        yield many, Layout(dp_shard=world // 2, pp=2), 16, 8
    if device_type == "cpu":
        for hidden_size, vocab_size, seq_len, micro_batch in _WIDE:
            wide, layout = _make_model(4, hidden_size, vocab_size), replace(whole, micro_batch=micro_batch)
            yield wide, layout, seq_len, 1
            yield wide, layout, seq_len, 2
        for layout in splits[1:]:
            hidden_size, vocab_size, seq_len, micro_batch = _WIDE[0]
            yield _make_model(4, hidden_size, vocab_size), replace(layout, micro_batch=micro_batch), seq_len, 1


def _make_model(num_layers: int, hidden_size: int = 64, vocab_size: int = 256) -> ModelShape:
    return ModelShape(
        name="probe", hidden_size=hidden_size, num_layers=num_layers, num_heads=4, num_kv_heads=4,
        ffn_size=3 * hidden_size, vocab_size=vocab_size,
    )  # fmt: skip


def _time_steps(
    model: ModelShape, batch: Batch, layout: Layout, kernels: Kernels, precision: Precision, device_type: str
) -> list[float]:
    """Seconds of each of `_STEPS` steps after the warm-up, as rank 0 measured them; all ranks get the same list. A step
    sums numbers over all ranks, so they end it together.

    Time that a virtual machine's host gave to other machines is subtracted: its mean share over these steps, since that
    share changes from minute to minute.
    """
    assembly = assemble(model, batch, layout, kernels, precision, seed=0, device_type=device_type)
    optimizer = build_optimizer(assembly.modules, model, AdamW())
    step = TrainStep(assembly.runtime, optimizer, max_norm=1.0, mesh=assembly.mesh, model=model)
    rows = batch.global_batch // layout.dp
    tokens = torch.randint(model.vocab_size, (rows, batch.seq_len), device=device_type)
    for _ in range(_WARM_UP_STEPS):
        step(tokens, tokens)
    busy, ends = ProcessorWatch(), [time.perf_counter()]
    for _ in range(_STEPS):
        step(tokens, tokens)  # waits for every rank, and for the update of the step before
        ends.append(time.perf_counter())
    seconds = torch.tensor(ends, dtype=torch.float64, device=device_type).diff() * (1 - busy.steal())
    dist.broadcast(seconds, 0)
    return seconds.tolist()
