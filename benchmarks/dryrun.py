"""Closed-form memory against a dry run of every stage, on the layouts that people ask about, as Markdown.

    make bench-dryrun

The study's best of each sweep (arXiv:2311.05610), and Llama-3.1 8B, Llama-2 70B and Llama-3.1 405B. The first rank of
each stage is run; the others of a stage hold the same but for shards that do not come out even.
"""

import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dtlayout.batch import Batch
from dtlayout.cluster import find_gpu
from dtlayout.config import Config, parse_config
from dtlayout.costmodel.memory import MemoryEstimate
from dtlayout.dryrun.ranks import dry_run_ranks
from dtlayout.dryrun.report import RankReport
from dtlayout.kernels import Kernels
from dtlayout.layout import Layout
from dtlayout.models.presets import find_preset
from dtlayout.precision import Precision
from dtlayout.training.prediction import predict

_GIB = 2**30


@dataclass(frozen=True)
class Subject:
    """A run to rehearse."""

    model: str
    gpu: str
    seq_len: int
    global_batch: int
    layout: Layout
    changes: tuple[tuple[str, int], ...] = ()
    """To the model's preset."""

    @property
    def config(self) -> Config:
        """As a file would say it, but for the layout."""
        blank = parse_config(
            {"model": {"name": "debug"}, "batch": {"global_batch": 8, "seq_len": 16}, "train": {"steps": 1}}
        )
        return replace(
            blank,
            model=replace(find_preset(self.model), **dict(self.changes)),
            batch=Batch(global_batch=self.global_batch, seq_len=self.seq_len),
            precision=Precision(reduce="bfloat16"),
        )


_A100, _H100 = "a100-80g-sxm", "h100-80g-sxm"
_VOCAB = (("vocab_size", 128_000),)
SUBJECTS = (
    Subject("llama-13b", _A100, 2048, 2048, Layout(dp_shard=64), _VOCAB),
    Subject("llama-13b", _A100, 8192, 512, Layout(pp=2, dp_shard=32, tp=2), _VOCAB),
    Subject("llama-30b", _A100, 2048, 2048, Layout(pp=4, dp_shard=32, tp=2), _VOCAB),
    Subject("llama-30b", _A100, 8192, 512, Layout(pp=4, dp_shard=8, tp=4), _VOCAB),
    Subject("llama-65b", _A100, 2048, 2048, Layout(pp=4, dp_shard=16, tp=2), _VOCAB),
    Subject("llama3.1-8b", _H100, 8192, 128, Layout(dp_shard=64, zero=3, recompute="selective")),
    Subject("llama2-70b", _H100, 4096, 1024, Layout(pp=4, dp_shard=16, tp=8)),
    Subject(
        "llama3.1-405b", _H100, 8192, 2048,
        Layout(
            pp=16, dp_shard=128, tp=8, schedule="interleaved-1f1b", virtual_stages=7, recompute="full",
        ),
    ),
)  # fmt: skip


def main() -> None:
    """Print the report."""
    import torch

    print("# Dry runs against formulas\n")
    print(f"torch {torch.__version__}, {os.cpu_count()} CPU cores, {platform.machine()}. `make bench-dryrun`\n")
    print("Peaks of the first rank of each stage, in GiB; seconds are of all of them, two at a time or as cores are.\n")
    print("| model | sequence | layout | stage | dry run | predicted | difference | microbatches run | seconds |")
    print("|---|--:|---|--:|--:|--:|--:|--:|--:|")
    for subject in SUBJECTS:
        for line in rehearse(subject):
            print(line, flush=True)


def rehearse(subject: Subject) -> Iterator[str]:
    """A row for each stage."""
    config, layout, gpu = subject.config, subject.layout, find_gpu(subject.gpu)
    estimate = predict(config, layout, gpu)
    assert estimate is not None, "the GPU type is known"
    ranks = range(0, layout.world_size, layout.world_size // layout.pp)
    start = time.monotonic()
    found = dry_run_ranks(
        config, layout, Kernels(), ranks, device_type=gpu.device_type, gpus_per_node=gpu.gpus_per_node
    )
    reports = sorted(found, key=lambda report: report.rank)
    seconds = f"{time.monotonic() - start:.0f}"
    print(f"{subject.model} {layout}: {seconds} s", file=sys.stderr, flush=True)
    for stage, report in enumerate(reports):
        yield _row(subject, stage, report, estimate.memory[stage], "" if stage else seconds)


def _row(subject: Subject, stage: int, report: RankReport, predicted: MemoryEstimate, seconds: str) -> str:
    dry, formula = report.peak_bytes, predicted.total
    microbatches = f"{report.num_microbatches_run} of {report.num_microbatches}"
    cells = [
        subject.model, f"{subject.seq_len:,}", str(subject.layout), str(stage), f"{dry / _GIB:.3f}",
        f"{formula / _GIB:.3f}", f"{formula / dry - 1:+.2%}", microbatches, seconds,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
