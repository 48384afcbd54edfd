"""Bubbles of every schedule on four ranks, measured beside predicted: `python -m benchmarks.bubbles`.

Stages sleep instead of computing, for their forward, for the gradient of their input and for that of their weight, so
that four ranks fit on two cores; everything else is what training runs: actions, messages over gloo, autograd, and
gradients of weights that are put off. All stages of a schedule take equally long, or every second one twice as long.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from dtlayout.base.formatting import plural
from dtlayout.mesh.build import build_mesh
from dtlayout.pipelining.runtime import Runtime, build_runtime
from dtlayout.pipelining.schedule import make_schedule
from dtlayout.pipelining.stage import Boundary
from dtlayout.pipelining.timing import time_pipeline
from dtlayout.schedules.fast_timing import StageTimes
from dtlayout.schedules.schedules import SCHEDULES, find_schedule
from dtlayout.spec.batch import Batch
from dtlayout.spec.layout import Layout
from dtlayout.training.timeline import TimelineRecorder

RANKS = 4
PART_S = 0.1
"""Seconds of each of the three parts of a microbatch on a rank, if all stages are alike."""
WIDTH = 8


class Case(NamedTuple):
    """A pipeline, and whether every second stage takes twice as long."""

    schedule: str
    virtual_stages: int
    num_microbatches: int
    uneven: bool

    @property
    def layout(self) -> Layout:
        """Layout of the case on four ranks."""
        return Layout(pp=RANKS, schedule=self.schedule, virtual_stages=self.virtual_stages)

    @property
    def part_s(self) -> list[float]:
        """Seconds of each part on each stage."""
        return [PART_S / self.virtual_stages * (1 + (self.uneven and stage % 2)) for stage in range(self.num_stages)]

    @property
    def num_stages(self) -> int:
        """All of them."""
        return RANKS * self.virtual_stages

    @property
    def busy_s(self) -> float:
        """Work of the busiest rank."""
        return 3 * self.num_microbatches * max(sum(self.layout.placement.take(self.part_s, r)) for r in range(RANKS))

    def predict(self) -> float:
        """The share of the step in which the busiest rank waits."""
        part_s = tuple(self.part_s)
        splits = find_schedule(self.schedule).splits_backward
        times = StageTimes(part_s, tuple(2 * each for each in part_s), (0.0,) * (self.num_stages - 1), part_s * splits)
        order = self.schedule, RANKS, self.virtual_stages, self.num_microbatches
        return 1 - self.busy_s / time_pipeline(*order, times).total_s


def list_cases() -> Iterator[Case]:
    """Every schedule with 4, 8 and 16 microbatches, as far as it takes them."""
    for name, schedule in SCHEDULES.items():
        for m in (4, 8, 16):
            if m >= schedule.least_rounds * RANKS:
                v = schedule.least_virtual_stages
                yield from (Case(name, v, m, uneven) for uneven in (False, True))


RECORDED = Case("1f1b", 1, 8, uneven=False)


class _Sleeping(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient[0], None


class SlowStage(nn.Module):
    """A linear layer whose forward, gradient of the input and gradient of the weight each take so long."""

    def __init__(self, *, is_last: bool):
        super().__init__()
        self.linear, self.seconds, self.is_last = nn.Linear(WIDTH, WIDTH, bias=False), 0.0, is_last
        self.linear.weight.register_hook(self._sleep)

    def _sleep(self, gradient: Tensor | None) -> None:
        if gradient is not None:  # autograd calls hooks also where it is put off
            time.sleep(self.seconds)

    def forward(self, x: Tensor) -> Tensor:
        y = _Sleeping.apply(self.linear(x), self.seconds)
        return y.sum() if self.is_last else y


def build(case: Case, mesh: DeviceMesh) -> tuple[Runtime, Tensor]:
    """The runtime that steps a case, and its inputs; one step that does not sleep has been done."""
    batch = Batch(global_batch=case.num_microbatches, seq_len=1)
    schedule = make_schedule(case.layout, batch)
    stages = schedule.placement.stages_of(dist.get_rank())
    modules = [SlowStage(is_last=stage == case.num_stages - 1) for stage in stages]
    runtime = build_runtime(modules, schedule, [], mesh, Boundary((1, WIDTH), torch.float32))
    inputs = torch.ones(case.num_microbatches, WIDTH)
    runtime.step(inputs)
    for stage, module in zip(stages, modules, strict=True):
        module.seconds = case.part_s[stage]
    return runtime, inputs


def time_step(runtime: Runtime, inputs: Tensor) -> float:
    """Seconds until the last rank has done a step that all begin together."""
    dist.barrier()
    start = time.perf_counter()
    runtime.step(inputs)
    ends: list[float] = [0.0] * RANKS
    dist.all_gather_object(ends, time.perf_counter() - start)
    return max(ends)


def measure(case: Case, mesh: DeviceMesh) -> float:
    """The share of a step in which the busiest rank waits."""
    return 1 - case.busy_s / time_step(*build(case, mesh))


def measure_recording(mesh: DeviceMesh, rounds: int = 8) -> float:
    """Share of a step by which recording it makes it longer: the median over steps that follow one not recorded."""
    runtime, inputs = build(RECORDED, mesh)
    recorder = TimelineRecorder("cpu", RECORDED.layout, timeout_s=60)
    runtime.before_action, runtime.after_input = recorder.before_action, recorder.after_input
    ratios = []
    for _ in range(rounds):
        alone_s = time_step(runtime, inputs)
        recorder.begin()
        ratios.append(time_step(runtime, inputs) / alone_s)
        recorder.gather()
    return statistics.median(ratios) - 1


def work(rank: int, rendezvous: str, rounds: int) -> None:
    """One rank; the first one prints. Each round has a step of every case: what disturbs some spares them in others."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    mesh, cases = build_mesh(Layout(pp=RANKS), "cpu"), list(list_cases())
    measured = [[measure(case, mesh) for case in cases] for _ in range(rounds)]
    if rank == 0:
        print_rows(cases, [statistics.median(shares) for shares in zip(*measured, strict=True)])
    added = measure_recording(mesh)
    if rank == 0:
        print(f"\n`metrics.timeline` makes a step of {RECORDED.schedule} with {RECORDED.num_microbatches} microbatches")
        print(f"{added:+.2%} longer, for {2 * RECORDED.num_microbatches} actions on each rank.")
    dist.destroy_process_group()


def print_rows(cases: Sequence[Case], measured: Sequence[float]) -> None:
    """A row of each case, and by how much the worst is off."""
    worst = 0.0
    for case, share in zip(cases, measured, strict=True):
        predicted = case.predict()
        worst = max(worst, abs(share - predicted))
        stages = "every second one twice" if case.uneven else "alike"
        row = f"{predicted:.3f} | {share:.3f} | {share - predicted:+.3f}"
        print(f"| {case.schedule} | {case.virtual_stages} | {case.num_microbatches} | {stages} | {row} |")
    print(f"\nLargest difference: {worst:.3f}.")


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("# Bubbles of pipeline schedules\n")
    print(f"`make bench NAME=bubbles`: {RANKS} ranks over gloo on {os.cpu_count()} CPU cores.")
    print(f"Stages sleep {PART_S * 1e3:.0f} ms for each of the three parts of a microbatch on a rank,")
    print("which takes no core; messages and autograd are those of training. A bubble is the share of")
    print(f"a step in which the busiest rank waits; medians of {plural(options.rounds, 'step')}.\n")
    print("| schedule | virtual stages | microbatches | stages take | predicted | measured | difference |")
    print("|---|--:|--:|---|--:|--:|--:|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (os.path.join(folder, "rendezvous"), options.rounds), nprocs=RANKS)


if __name__ == "__main__":
    main()
