"""What the host takes of a layer: a step of layers that are almost no work for the device.

A rank among others that are not there, under torch's fake process group, whose collectives return at once.
"""

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.cells import HostTime
from benchmarks.gpu.rows import HostTimes
from dtlayout.batch import Batch
from dtlayout.device import Device
from dtlayout.dryrun.world import fake_world
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.model_shape import ModelShape
from dtlayout.precision import Precision
from dtlayout.training.build import Assembly, assemble

_FEW, _MANY = 2, 6
"""Layers of the two models whose steps are compared, so that embedding, head and the step's rest drop out."""
_MICROBATCHES, _ROUNDS = 4, 5
_BATCH = Batch(global_batch=_MICROBATCHES, seq_len=32)


def measure_host(cell: HostTime, device: Device) -> HostTimes:
    """Seconds of one layer of one microbatch, forward and backward."""
    kernels = Kernels(compile=cell.compile)
    precision = Precision(compute="bfloat16" if device.type == "cuda" else "float32")
    kernels.check(precision, device, tp=cell.tp)
    with fake_world(0, cell.tp):
        few, many = (_prepare(cell, layers, kernels, precision, device.type) for layers in (_FEW, _MANY))
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        # In turn, for the host may be slower at one time than at another.
        rounds = [(_time(few, wait), _time(many, wait)) for _ in range(_ROUNDS)]
    more_s = statistics.median(many_s - few_s for few_s, many_s in rounds)
    return HostTimes(layer_s=more_s / (_MANY - _FEW) / _MICROBATCHES)


def _prepare(
    cell: HostTime, num_layers: int, kernels: Kernels, precision: Precision, device_type: str
) -> Callable[[], object]:
    """A step without an update, once done."""
    model = ModelShape(
        name="host", hidden_size=256, num_layers=num_layers, num_heads=16, num_kv_heads=8, ffn_size=512, vocab_size=512
    )  # fmt: skip
    layout = Layout(tp=cell.tp, sequence_parallel=cell.tp > 1)
    built = assemble(model, _BATCH, layout, kernels, precision, seed=0, device_type=device_type)
    tokens = torch.zeros(_BATCH.global_batch, _BATCH.seq_len, dtype=torch.int64, device=device_type)

    def step(assembly: Assembly = built) -> None:
        assembly.runtime.step(tokens, targets=tokens, num_targets=1.0)
        for module in assembly.modules:
            module.zero_grad()

    step()
    return step


def _time(step: Callable[[], object], wait: Callable[[], None]) -> float:
    """Seconds of a step until the device is idle, which it is almost always."""
    wait()
    started = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - started
