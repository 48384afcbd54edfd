"""The three ways to share a sequence over cp: bytes sent and step time on 4 CPU ranks, beside what is predicted.

    make bench NAME=context

Calibrates this machine, steps a small Llama in each way with 2,048 to 32,768 tokens, in alternating rounds, and counts
what a rank sends over cp; then deals out made documents by tokens and by scores, which needs no rank. Ten minutes in
which the machine should have nothing else to do; --cluster takes a file that is there already.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.calibration import run_command
from benchmarks.pages.markdown import made_by
from dtlayout.base.process import leave
from dtlayout.costmodel.engine import OWN_ENGINE, find_engine_on
from dtlayout.costmodel.estimate import estimate
from dtlayout.costmodel.scenario import Scenario
from dtlayout.dryrun.collectives import observe_collective
from dtlayout.measure.storages import any_wraps
from dtlayout.ops.attention import causal_attention
from dtlayout.ops.composite import call_seen
from dtlayout.ops.documents import count_scores, share_positions
from dtlayout.spec.batch import Batch
from dtlayout.spec.cluster import load_cluster
from dtlayout.spec.context_parallel import CONTEXT_METHODS, chunk_length, own_parts
from dtlayout.spec.kernels import Kernels
from dtlayout.spec.layout import Layout
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.optimizers import AdamW
from dtlayout.spec.precision import Precision
from dtlayout.training.build import assemble
from dtlayout.training.optimizer import build_optimizer
from dtlayout.training.step import TrainStep

CP = 4
MODEL = ModelShape(
    name="small", hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=4, ffn_size=128, vocab_size=256
)
LENGTHS = (2048, 4096, 8192, 16384, 32768)
PRECISION = Precision(compute="float32")
DOCUMENTS = {"a page each": (6.9, 1.2), "books among notes": (5.0, 2.5), "chapters": (7.5, 1.0)}
"""Mean and deviation of the logarithm of a document's length."""
_SHARED = ((8192, 4), (131072, 8), (131072, 16))


class Measured(NamedTuple):
    """A way with a length."""

    sent_bytes: int
    """Over cp by rank 0, in a step."""
    steps_s: list[float]


def main() -> int:
    """Measure, and print the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cluster", type=Path, help="of this machine, as dtlayout calibrate writes it")
    parser.add_argument("--measured", type=Path, help="of the ranks that this starts: where they leave what they found")
    options = parser.parse_args()
    if options.measured:
        measure(options.rounds, options.measured)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        cluster, measured = options.cluster or Path(folder, "lab.toml"), Path(folder, "measured.json")
        if not cluster.exists():
            print(run_command("calibrate", "--ranks", str(CP), "--out", str(cluster)), file=sys.stderr)
        load = os.getloadavg()[0]
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(CP))
        own = ("-m", "benchmarks.context", "--measured", str(measured), "--rounds", str(options.rounds))
        subprocess.run([sys.executable, *launcher, *own], stdout=sys.stderr, check=True)
        print("\n".join(report(json.loads(measured.read_text()), cluster, options.rounds, load)))
    return 0


def measure(rounds: int, path: Path) -> None:
    """On each of cp's ranks: step each way with each length, a round after the other; rank 0 writes what it found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Measured] = {}
    for seq_len in LENGTHS:
        steps = {method: build_step(method, seq_len) for method in CONTEXT_METHODS}
        for method, (step, rows) in steps.items():
            with Sent() as sent:
                step(rows, rows)  # the first step, which no time is taken of
            found[f"{method} {seq_len}"] = Measured(sent.num_bytes, [])
        for _ in range(rounds):
            for method, (step, rows) in steps.items():
                dist.barrier()
                start_s = time.perf_counter()
                step(rows, rows)
                found[f"{method} {seq_len}"].steps_s.append(time.perf_counter() - start_s)
                if dist.get_rank() == 0:
                    print(f"{method}, {seq_len} tokens: {time.perf_counter() - start_s:.2f} s", flush=True)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


def build_step(method: str, seq_len: int) -> tuple[TrainStep, torch.Tensor]:
    """A trainer's step, and a rank's tokens, which are their own targets."""
    layout, batch = Layout(cp=CP, cp_method=method), Batch(global_batch=1, seq_len=seq_len)
    layout.check(MODEL, batch)
    assembly = assemble(MODEL, batch, layout, Kernels(), PRECISION, seed=0, device_type="cpu")
    optimizer = build_optimizer(assembly.modules, MODEL, AdamW())
    step = TrainStep(assembly.runtime, optimizer, max_norm=1.0, mesh=assembly.mesh, model=MODEL)
    generator = torch.Generator().manual_seed(dist.get_rank())
    return step, torch.randint(MODEL.vocab_size, (1, seq_len // CP), generator=generator)


class Sent(TorchDispatchMode):
    """Bytes that this rank sends over cp inside the block: by functional collectives, which nothing else here uses."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any_wraps(types):
            return NotImplemented
        result = call_seen(self, func, args, kwargs or {})
        if func.namespace == "_c10d_functional" and (event := observe_collective(func, args, kwargs or {}, result)):
            is_hop = event.name == "all_to_all" and 0 in args[1]  # a ring's, all of which goes to one rank
            self.num_bytes += event.nbytes if is_hop else event.nbytes * (CP - 1) // CP
        return result


def predict_bytes(method: str, seq_len: int) -> int:
    """Bytes that a step sends by the table in plans/context.py; gradients have the format of keys here."""
    head = seq_len // CP * MODEL.head_width * 4
    queries, kv = MODEL.num_heads, 2 * MODEL.num_kv_heads
    heads = 2 * (2 * queries + kv) / CP if method == "all-to-all" else 3 * kv
    return round(MODEL.num_layers * (CP - 1) * heads * head)


def predict_s(method: str, seq_len: int, cluster: Path) -> float:
    """A step's seconds, by the cost model with the machine's constants."""
    machine = load_cluster(cluster)
    scenario = Scenario(
        model=MODEL,
        batch=Batch(global_batch=1, seq_len=seq_len),
        cluster=machine,
        engine=find_engine_on(OWN_ENGINE, machine.gpu),
        precision=PRECISION,
    )
    return estimate(scenario, Layout(cp=CP, cp_method=method), Kernels()).step_time_s


def report(found: dict[str, Any], cluster: Path, rounds: int, load: float) -> list[str]:
    """Lines of the page."""
    lines = [
        "# Three ways to share a sequence\n",
        f"{made_by('context')} for {CP} gloo ranks with a thread each,",
        f"cp={CP}, a Llama of {MODEL.num_layers} layer, hidden {MODEL.hidden_size}, {MODEL.num_heads} heads, fp32, one "
        f"sequence a step. Medians of {rounds} alternating rounds. The machine",
        f"had a load of {load:.1f} before the first: what others do there makes steps longer. Predictions are the",
        "cost model's with constants that `dtlayout calibrate` measured there; that ranks share cores it knows as",
        "contention.\n",
        "| tokens | way | sent over cp, bytes a rank | predicted | step, s | rounds, s | predicted, s | error |",
        "|--:|---|--:|--:|--:|---|--:|--:|",
    ]
    by_length = defaultdict[str, list[float]](list)
    for seq_len in LENGTHS:
        for method in CONTEXT_METHODS:
            measured = Measured(*found[f"{method} {seq_len}"])
            step_s, predicted_s = median(measured.steps_s), predict_s(method, seq_len, cluster)
            by_length[method].append(predicted_s / step_s - 1)
            spread = f"{min(measured.steps_s):.2f} to {max(measured.steps_s):.2f}"
            sent = f"{measured.sent_bytes:,} | {predict_bytes(method, seq_len):,}"
            lines.append(
                f"| {seq_len:,} | {method} | {sent} | {step_s:.2f} | {spread} | {predicted_s:.2f} "
                f"| {predicted_s / step_s - 1:+.0%} |"
            )
    is_equal = all(
        found[f"{method} {seq_len}"][0] == predict_bytes(method, seq_len)
        for seq_len in LENGTHS
        for method in CONTEXT_METHODS
    )
    verdict = "Bytes are equal in every row" if is_equal else "BYTES DIFFER"
    errors = ", ".join(f"{method} {median(map(abs, each)):.0%}" for method, each in by_length.items())
    return [
        *lines,
        f"\n{verdict}. Median sizes of the steps' errors: {errors}.",
        describe_attention(),
        *compare_documents(),
    ]


def describe_attention() -> str:
    """Speed of the attention kernel at the length that a calibration times, and at a shorter and a longer one."""
    torch.set_num_threads(1)
    short, timed, long = (measure_attention(seq_len) / 1e9 for seq_len in (512, 2048, 8192))
    return (
        f"Attention's forward reaches {timed:.0f} GFLOP/s on a core with 2,048 tokens, the most that calibrations\n"
        f"time, {short:.0f} with 512 and {long:.0f} with 8,192; predictions know one number.\n"
    )


def measure_attention(seq_len: int) -> float:
    """FLOP/s of causal attention, the best of some."""
    q, k, v = (torch.randn(1, MODEL.num_heads, seq_len, MODEL.head_width) for _ in range(3))
    times_s = []
    for _ in range(5):
        start_s = time.perf_counter()
        causal_attention(q, k, v, Kernels().attention)
        times_s.append(time.perf_counter() - start_s)
    return 2 * MODEL.num_heads * seq_len**2 * MODEL.head_width / min(times_s)


def compare_documents() -> list[str]:
    """How even a rank's work is where documents are kept apart, by tokens and by scores."""
    lines = [
        "## Documents\n",
        "The scores that the mask leaves of the rank with most, over the mean of all ranks: means of 4 made sequences,",
        "whose documents' lengths have normal logarithms. *Ring* is what it waits for: of each hop the rank with most,",
        "over the same mean. Zig-zag halves are by tokens alone.\n",
        "| documents | tokens | cp | zig-zag | by scores | ring, zig-zag | ring, by scores |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, (middle, spread) in DOCUMENTS.items():
        for seq_len, cp in _SHARED:
            parts = [own_parts("zig-zag", seq_len, cp, rank) for rank in range(cp)]
            by_tokens = torch.tensor([[position for part in own for position in part] for own in parts])
            found = []
            for seed in range(4):
                starts = make_starts(seed, seq_len, middle, spread)
                ways = [weigh_hops(starts, shares) for shares in (by_tokens, share_positions(starts, cp))]
                found.append([max(map(sum, hops)) / _mean_work(hops) for hops in ways])
                found[-1] += [sum(map(max, zip(*hops, strict=True))) / _mean_work(hops) for hops in ways]
            cells = " | ".join(f"{mean(column):.2f}" for column in zip(*found, strict=True))
            lines.append(f"| {name} | {seq_len:,} | {cp} | {cells} |")
    return lines


def make_starts(seed: int, seq_len: int, middle: float, spread: float) -> torch.Tensor:
    """Marks [1, S] of the positions at which the documents of a sequence start."""
    lengths = torch.empty(seq_len).log_normal_(middle, spread, generator=torch.Generator().manual_seed(seed)).ceil()
    firsts = torch.cat((torch.zeros(1), lengths.double().cumsum(0)))
    positions = torch.arange(seq_len, dtype=torch.float64)
    return firsts[torch.searchsorted(firsts, positions, right=True) - 1].to(torch.int32)[None]


def weigh_hops(starts: torch.Tensor, shares: torch.Tensor) -> list[list[int]]:
    """For each rank and hop, the number of scores that the mask leaves of the rank's queries and that hop's keys."""
    cp, seq_len = shares.shape[0], starts.shape[1]
    length = chunk_length(seq_len, cp)
    owners = torch.empty(seq_len, dtype=torch.int64)
    owners[shares.flatten()] = torch.arange(cp).repeat_interleave(seq_len // cp)
    positions, work = torch.arange(seq_len), torch.zeros(cp, cp, dtype=torch.int64)
    for first in range(0, seq_len, length):  # keys, all of one rank
        seen = (positions[first:] + 1).clamp(max=first + length) - starts[0, first:].clamp(min=first)
        scores = torch.zeros(cp, dtype=torch.int64).index_add_(0, owners[first:], seen.clamp(min=0))
        work[torch.arange(cp), (torch.arange(cp) - owners[first]) % cp] += scores
    assert work.sum() == count_scores(starts, seq_len).sum(), "each score is of one hop"
    return [[int(scores) for scores in row] for row in work]


def _mean_work(hops: list[list[int]]) -> float:
    return mean(map(sum, hops))


if __name__ == "__main__":
    leave(main())
